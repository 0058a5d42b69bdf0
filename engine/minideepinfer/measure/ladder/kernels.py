"""Kernel times of what a rung changes: the new operators and those they replace, in turn on the fixed problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from minideepinfer.measure.kernels import kernel_family
from minideepinfer.measure.kernels.bench import Entrant, KernelBench, Result
from minideepinfer.measure.ladder import KERNEL, KERNEL_BEFORE
from minideepinfer.measure.record import Measurement
from minideepinfer.operators import FAMILIES, OperatorRegistry, Phase
from minideepinfer.operators.plan import Plan

_REPEATS = 10


@dataclass
class KernelEvidence:
    """What goes into a rung's record; see `Record`."""

    values: dict[str, Measurement] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def kernel_evidence(
    before: Plan,
    after: Plan,
    preset: str,
    registry: OperatorRegistry,
    device: torch.device,
    rates: Mapping[str, float],
    seed: int,
) -> KernelEvidence:
    """Check and time what serves prefill in one plan and not in another one.

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
    for family in FAMILIES:
        old, new = entrants(before, family), entrants(after, family)
        added = [entrant for entrant in new if entrant not in old]
        if not added:
            continue
        try:
            kernel_family(family)
        except ModuleNotFoundError:
            evidence.notes.append(f"bench kernel has no problems for {family}; only its stage and step are measured")
            continue
        gone = [entrant for entrant in old if entrant not in new]
        bench = KernelBench(family, [*gone, *added], registry, device, rates, _REPEATS, seed)
        for results in bench.run(preset):
            _keep(evidence, results[: len(gone)], results[len(gone) :])
    return evidence


def entrants(plan: Plan, family: str) -> list[Entrant]:
    """The operators of a family that serve prefill, each once."""
    found: list[Entrant] = []
    for (of, _, phase), planned in plan.operators.items():
        entrant = Entrant(planned.registered, planned.options.model_dump(mode="json", exclude_defaults=True))
        if of == family and phase is Phase.PREFILL and entrant not in found:
            found.append(entrant)
    return found


def _keep(evidence: KernelEvidence, gone: list[Result], added: list[Result]) -> None:
    replaced = next((result.time for result in gone if result.time), None)
    for result in added:
        name = f"{result.operator.title}, {result.problem}"
        if result.failure:
            evidence.notes.append(f"kernel {name}: {result.failure}")
        if result.time is None:
            continue
        evidence.values[KERNEL + name] = result.time
        evidence.floors[KERNEL + name] = result.floor
        errors = [error for output, error in (result.errors or {}).items() if output != "of_bound"]
        evidence.errors[KERNEL + name] = max(errors, default=0.0)
        if replaced is not None and len(gone) == 1:
            evidence.values[KERNEL_BEFORE + name] = replaced
