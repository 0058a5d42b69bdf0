"""A built operator where it serves, so that whatever its code raises says whose code it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minideepinfer.errors import MiniDeepInferError, OperatorError


class Placed:
    """Stands for a built operator, with all of its attributes.

    What leaves a method as an exception becomes an `OperatorError` that names operator and place, raised from the
    original; the project's own errors pass unchanged, they name somebody already.

    Attributes:
        operator: the built operator.
        who: how messages call it, e.g. `attention:fast (acme-ops 1.0) in layer 3, decode`.
    """

    def __init__(self, operator: Any, who: str) -> None:
        self.operator = operator
        self.who = who

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "operator":
            raise AttributeError(name)
        found = getattr(self.operator, name)
        if not callable(found):
            return found
        blaming = _blaming(found, f"{self.who}: {name}")
        setattr(self, name, blaming)  # so that it is looked up once
        return blaming


def unplaced(operator: Any) -> Any:
    """The built operator itself, which several places may share."""
    return operator.operator if isinstance(operator, Placed) else operator


def placed_like(operator: Any, part: Any) -> Any:
    """Something that an operator returned and whose methods will be called, placed as the operator is."""
    return Placed(part, operator.who) if isinstance(operator, Placed) else part


def _blaming(method: Callable[..., Any], who: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except MiniDeepInferError:
            raise
        except (Exception, SystemExit) as error:
            raise OperatorError(f"{who} raised {type(error).__name__}: {error}") from error

    return call
