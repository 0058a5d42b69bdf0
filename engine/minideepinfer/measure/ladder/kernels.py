"""Kernel times of what a rung changes: new operators and those they replace, in turn on problems of `bench kernel`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.measure.floor import floor_ms
from minideepinfer.measure.kernels import kernel_family
from minideepinfer.measure.kernels.bench import Entrant, own_cost
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.ladder import KERNEL, KERNEL_BEFORE
from minideepinfer.measure.ladder.errors import largest, missing_share, relative_error
from minideepinfer.measure.record import Measurement
from minideepinfer.measure.timing import Call, time_calls
from minideepinfer.operators import FAMILIES, OperatorRegistry, Phase
from minideepinfer.operators.plan import Plan
from minideepinfer.testing.contract import Outputs
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tolerances import conformance

_PRECISION = ("dtype", "kv_quantization", "activation_quantization")
_REPEATS, _SECONDS = 10, 0.5


@dataclass
class KernelEvidence:
    """What goes into a rung's record; see `Record`."""

    values: dict[str, Measurement] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@torch.inference_mode()
def kernel_evidence(
    before: Plan,
    after: Plan,
    preset: str,
    registry: OperatorRegistry,
    device: torch.device,
    rates: Mapping[str, float],
    seed: int,
) -> KernelEvidence:
    """Time what serves prefill in one plan and not in another one.

    Times of an operator stand beside those of the one that it replaces, on the same inputs, and the difference of their
    outputs is its error. Only problems in the plan's precision are looked at.

    Args:
        before: the plan that a rung builds on.
        after: its own.
        preset: problems of `bench kernel`.
        registry: where references are found.
        device: where to run.
        rates: of this session.
        seed: of all numbers.
    """
    evidence = KernelEvidence()
    for name in FAMILIES:
        old, new = entrants(before, name), entrants(after, name)
        added = [entrant for entrant in new if entrant not in old]
        if not added:
            continue
        family = _family(name)
        if family is None:
            evidence.notes.append(f"bench kernel has no problems for {name}: only its stages and the step are measured")
            continue
        gone = [entrant for entrant in old if entrant not in new]
        problem = next(planned.problem for key, planned in after.operators.items() if key[0] == name)
        timing = _Timing(family, registry, device, rates, evidence)
        for title, (kernel, recipe) in family.problems.get(preset, {}).items():
            if all(getattr(recipe, fact, None) in (None, getattr(problem, fact, None)) for fact in _PRECISION):
                try:
                    timing.add(title, kernel, replace(recipe, seed=seed), gone[0] if len(gone) == 1 else None, added)
                except Exception as error:  # the rung ran in the model; what its kernel lacks is told in its record
                    evidence.notes.append(f"kernel times of {name}, {title}: {type(error).__name__}: {error}")
    return evidence


def entrants(plan: Plan, family: str) -> list[Entrant]:
    """The operators of a family that serve prefill, each once."""
    found: list[Entrant] = []
    for (of, _, phase), planned in plan.operators.items():
        entrant = Entrant(planned.registered, planned.options.model_dump(mode="json", exclude_defaults=True))
        if of == family and phase is Phase.PREFILL and entrant not in found:
            found.append(entrant)
    return found


def _family(name: str) -> KernelFamily | None:
    """None where `bench kernel` knows nothing of a family."""
    try:
        return kernel_family(name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("minideepinfer."):
            raise
        return None


class _Timing:
    """Calls of one family's operators."""

    def __init__(
        self,
        family: KernelFamily,
        registry: OperatorRegistry,
        device: torch.device,
        rates: Mapping[str, float],
        evidence: KernelEvidence,
    ) -> None:
        self._family, self._registry, self._device = family, registry, device
        self._rates, self._evidence = rates, evidence

    def add(self, problem: str, kernel: Kernel, recipe: Any, gone: Entrant | None, added: list[Entrant]) -> None:
        """Add times, floors and errors on one problem; nothing where an operator does not serve it."""
        case, evidence = self._family.make(recipe, self._device), self._evidence
        calls: dict[str, Call] = {}
        outputs: dict[str, Outputs] = {}
        for entrant in ([gone] if gone else []) + added:
            subject = Subject(
                entrant.registered, self._registry, conformance(self._family.family), self._device, entrant.changes
            )
            if subject.obstacles(case):
                continue
            operator, title = subject.operator(case), entrant.title
            calls[title] = kernel.bind(subject, operator, case)
            outputs[title] = kernel.outputs(case, calls[title]())
            if entrant is not gone:
                cost = own_cost(entrant.registered, operator, case, kernel.cost(case))
                evidence.floors[f"{KERNEL}{title}, {problem}"] = floor_ms(cost, self._rates)
        times = time_calls(calls, self._device, _REPEATS, warmup=1, seconds=_SECONDS)
        base = gone.title if gone else ""
        for title in times.keys() - {base}:
            name = f"{title}, {problem}"
            evidence.values[KERNEL + name] = times[title]
            if base in times:
                evidence.values[KERNEL_BEFORE + name] = times[base]
                error = largest(_errors(outputs[title], outputs[base]))
                if math.isfinite(error):
                    evidence.errors[KERNEL + name] = error
                else:
                    evidence.notes.append(f"kernel {name}: its outputs and those of {base} have no finite difference")


def _errors(own: Outputs, base: Outputs) -> Iterator[float]:
    for name, reference in base.items():
        yield _error(own[name], reference)


def _error(own: Tensor, reference: Tensor) -> float:
    if own.is_floating_point():
        return relative_error(own, reference)
    return missing_share(own, reference) if own.dim() == 2 else float((own != reference).double().mean())
