"""An operator as a part of a model, where it serves; elsewhere the model has reference operators.

Every call that the model makes of the reference operator is also made of the operator under test, and compared within
the family's bound. Then the model runs with the operator in its place (`minideepinfer.testing.rehearsal`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from minideepinfer.config import ModelConfig
from minideepinfer.errors import OperatorError
from minideepinfer.operators import FAMILIES
from minideepinfer.operators.plan import PlanKey
from minideepinfer.operators.support import obstacles
from minideepinfer.runtime.problems import layer_problems
from minideepinfer.testing.contract import Refused, Violation
from minideepinfer.testing.models import MODELS, checkpoint
from minideepinfer.testing.rehearsal import Rehearsal, Stage
from minideepinfer.testing.subject import Subject, crashing


def end_to_end(subject: Subject) -> None:
    """The comparison in every compute dtype, in the first model of which the operator serves a layer."""
    for dtype in subject.dtypes:
        compare_in_model(subject, *nearest_model(subject, dtype))


def compare_in_model(subject: Subject, stage: Stage, places: Iterable[PlanKey]) -> None:
    """Call by call, then as a whole.

    Args:
        subject: the operator.
        stage: a model.
        places: the layers and phases of it in which the operator serves.

    Raises:
        Violation: a result or the logits are off.
        Crash: the operator raised an exception.
    """
    served = set(places)

    def compare(place: PlanKey, case: Any) -> None:
        if place in served:
            try:
                subject.family.compare(subject, case, subject.run(case), subject.reference(case), 1.0)
            except Violation as violation:
                where = place[2] if place[1] is None else f"layer {place[1]}, {place[2]}"
                raise Violation(f"{where}: {violation}") from None

    with crashing(subject.registered):
        Rehearsal(stage, reference_ops(subject), ops_at(subject, served), subject.measure, compare).check()


def pair_end_to_end(subject: Subject) -> None:
    """A pair in all layers, in float32 or else in the first dtype, in the first model that it serves."""
    dtype = "float32" if "float32" in subject.dtypes else subject.dtypes[0]
    assert subject.family.partner is not None
    partner, own = subject.family.partner, subject.registered.declaration.family
    pair = {own: subject.choice, partner.declaration.family: partner.name}
    ops, reasons = reference_ops(subject) | pair, ""
    for name in MODELS:
        stage = Stage(checkpoint(name), subject.registry, dtype, str(subject.device))
        try:
            stage.runner(ops)
        except OperatorError as error:
            reasons = str(error)
            continue
        with crashing(subject.registered):
            Rehearsal(stage, reference_ops(subject), ops, subject.measure).check()
        return
    raise Refused(reasons)


def nearest_model(subject: Subject, dtype: str, block: tuple[int, int] = (32, 32)) -> tuple[Stage, list[PlanKey]]:
    """The first model of which the operator serves a layer, with the layers and phases that it serves.

    Args:
        subject: the operator.
        dtype: compute dtype.
        block: see `checkpoint`.

    Raises:
        Refused: it serves none of any.
    """
    reasons: dict[str, None] = {}
    for name in MODELS:
        stage = Stage(checkpoint(name, block), subject.registry, dtype, str(subject.device))
        refusals = _refusals(subject, stage)
        if places := [key for key, found in refusals.items() if not found]:
            return stage, places
        reasons |= dict.fromkeys(reason for found in refusals.values() for reason in found)
    raise Refused(f"serves no layer of any model that the kit makes: {'; '.join(list(reasons)[:3])}")


def _refusals(subject: Subject, stage: Stage) -> dict[PlanKey, tuple[str, ...]]:
    """Why the operator does not serve the layers and phases of a model."""
    capability = torch.cuda.get_device_capability(subject.device) if subject.device.type == "cuda" else None
    model = ModelConfig.from_file(stage.path)
    problems = layer_problems(model, stage.config({}), subject.device.type, capability)
    declaration = subject.registered.declaration
    own = {key: problem for key, problem in problems.items() if key[0] == declaration.family}
    return {key: obstacles(declaration, p) or subject.refused_options(p) for key, p in own.items()}


def reference_ops(subject: Subject) -> dict[str, Any]:
    """Reference operators everywhere."""
    return {family: subject.reference_operator(family).name for family in FAMILIES}


def ops_at(subject: Subject, places: Iterable[PlanKey]) -> dict[str, Any]:
    """The operator under test in some layers and phases, reference operators elsewhere."""
    ops: dict[str, Any] = dict(reference_ops(subject))
    family, choice = subject.registered.declaration.family, subject.choice
    layers: dict[str, dict[str, Any]] = {}
    phases: dict[str, Any] = {}
    for _, layer, phase in places:
        chosen = phases if layer is None else layers.setdefault(str(layer), {})
        chosen[phase.value] = choice
    return ops | {family: {"default": ops[family], "layers": layers, **phases}}
