"""Checking a whole plan: several operators together in one model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.errors import ConfigError, OperatorError
from minideepinfer.operators import FAMILIES, OperatorRegistry
from minideepinfer.testing.checking import FAILED, PASSED, Outcome, Report
from minideepinfer.testing.contract import Violation
from minideepinfer.testing.models import MODELS, checkpoint
from minideepinfer.testing.rehearsal import STEPS, Rehearsal, Stage
from minideepinfer.testing.subject import in_bounds, reference_operator


def check_plan(registry: OperatorRegistry, ops: Mapping[str, Any], device: str = "cpu") -> Report:
    """Compare a plan with the plan of reference operators, in the first model that it serves.

    Models are the packaged trained one and those of `minideepinfer.testing.models`, each in float32 and in bfloat16.

    Args:
        registry: operators to choose from.
        ops: the choice, as in `EngineConfig.ops`; families that it leaves out have their reference operator.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: the choice is no choice.
        OperatorError: an operator is unknown, or the plan serves none of the models.
    """
    start = time.perf_counter()
    references = {family: reference_operator(registry, family).name for family in FAMILIES}
    chosen = references | dict(ops)
    worst, reason = 0.0, ""

    def measure(error: torch.Tensor, bound: torch.Tensor, what: str) -> None:
        nonlocal worst
        worst = max(worst, in_bounds(error, bound, what))

    name, stage = _first_served(registry, chosen, device)
    try:
        Rehearsal(stage, references, chosen, measure).check()
    except (Violation, OperatorError) as error:
        reason = str(error)
    outcome = Outcome("end-to-end", FAILED if reason else PASSED, reason)
    title = f"plan {', '.join(f'{family}={choice}' for family, choice in ops.items())} in {name}, {stage.dtype}"
    return Report(title, (outcome,), len(STEPS), Counter(), worst, time.perf_counter() - start)


def _first_served(registry: OperatorRegistry, ops: Mapping[str, Any], device: str) -> tuple[str, Stage]:
    """The name of the model, and the model."""
    reasons: dict[str, None] = {}
    for dtype in ("float32", "bfloat16"):
        for name, path in (("tiny", directory_of("tiny")), *((name, checkpoint(name)) for name in MODELS)):
            stage = Stage(path, registry, dtype, device)
            try:
                stage.runner(ops)
            except ConfigError:
                raise
            except OperatorError as error:
                reasons[str(error)] = None
                continue
            return name, stage
    raise OperatorError(f"the plan serves none of the kit's models: {'; '.join(list(reasons)[:3])}")
