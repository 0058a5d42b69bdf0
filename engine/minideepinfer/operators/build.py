"""From a planned operator to a built one: the only place where operator code is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minideepinfer.errors import MiniDeepInferError, PluginError
from minideepinfer.operators.context import BuildContext, NoClock, StageClock
from minideepinfer.operators.families import METHODS
from minideepinfer.operators.plan import PlannedOperator
from minideepinfer.operators.problem import Problem
from minideepinfer.operators.registry import RegisteredOperator

if TYPE_CHECKING:
    import torch


class OperatorBuilder:
    """Builds operators for one device; layers with equal operator, problem and options share one instance."""

    def __init__(self, device: torch.device, clock: StageClock | None = None) -> None:
        self._device = device
        self._clock = clock or NoClock()
        self._built: dict[tuple[RegisteredOperator, Problem, str], Any] = {}

    def build(self, planned: PlannedOperator) -> Any:
        """The operator object for a choice; the same object for an equal one.

        Raises:
            PluginError: its code cannot be imported, or `build` failed or returned no operator; names the distribution.
        """
        key = (planned.registered, planned.problem, planned.options.model_dump_json())
        if key not in self._built:
            self._built[key] = build(planned, self._device, self._clock)
        return self._built[key]


def build(planned: PlannedOperator, device: torch.device, clock: StageClock | None = None) -> Any:
    """Build one operator.

    Args:
        planned: the choice.
        device: where its tensors will live.
        clock: where it reports stages; None = nowhere.

    Returns:
        What the declaration's `build` returns for a `BuildContext`.

    Raises:
        PluginError: its code cannot be imported, or `build` failed or returned no operator; names the distribution.
    """
    function = _function(planned.registered)
    context = BuildContext(planned.problem, planned.options, device, clock or NoClock())
    try:
        built = function(context)
    except MiniDeepInferError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{planned.registered.title} failed to build: {type(error).__name__}: {error}") from error
    registered = planned.registered
    if missing := [m for m in METHODS[registered.declaration.family] if not callable(getattr(built, m, None))]:
        what = type(built).__name__
        raise PluginError(f"{registered.title}: build returned {what}, which has no method {', '.join(missing)}")
    return built


def _function(operator: RegisteredOperator) -> Callable[[BuildContext], Any]:
    path = operator.declaration.build
    module_name, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{operator.title}: {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PluginError(f"{operator.title}: {path!r} is a {type(found).__name__}; a function is needed")
    function: Callable[[BuildContext], Any] = found
    return function
