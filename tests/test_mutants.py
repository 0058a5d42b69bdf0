"""The kit's own measure: it kills every broken operator by what was named in advance, and passes the correct ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import measured
import pytest
from minideepinfer.operators import FAMILIES, OperatorRegistry, RegisteredOperator, Tier, load_registry
from minideepinfer.testing.checking import FAILED, check_one, check_operator
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tolerances import conformance
from mutants import Mutant, attention, comm, epilogue, indexer, moe, residual
from mutants.faults import FAULTS
from mutants.made import PackageMutant

sys.path.append(str(Path(__file__).parents[1] / "examples/acme_ops"))
from acme_ops.plugin import minideepinfer_operators as acme_declarations

REGISTRY: OperatorRegistry = load_registry()
NAIVE = {
    family: operator
    for family in FAMILIES
    for operator in REGISTRY.operators(family)
    if operator.declaration.tier is Tier.REFERENCE
}
TILED = RegisteredOperator(acme_declarations()[0], "acme-ops", "0", "attention")
MUTANTS = [
    *((mutant, NAIVE["attention"]) for mutant in attention.NAIVE),
    *((mutant, TILED) for mutant in attention.TILED),
    *((mutant, NAIVE["indexer"]) for mutant in indexer.NAIVE),
    *((mutant, NAIVE["moe"]) for mutant in moe.NAIVE),
    *((mutant, NAIVE["comm"]) for mutant in comm.NAIVE),
    *((mutant, REGISTRY.get("comm", "collective")) for mutant in comm.COLLECTIVE),
    *((mutant, REGISTRY.get("comm", "all_to_all")) for mutant in comm.ALL_TO_ALL),
    *((mutant, NAIVE["residual"]) for mutant in residual.NAIVE),
    *((mutant, NAIVE["epilogue"]) for mutant in epilogue.NAIVE),
]
KILLED: list[str] = []
QUICK = replace(PROFILES["quick"], shrink=False)


def _id(value: object) -> str:
    return value.name if isinstance(value, Mutant | PackageMutant) else str(value.declaration.family)


@pytest.mark.parametrize(("mutant", "origin"), MUTANTS, ids=_id)
def test_a_broken_operator_is_killed_as_foretold(mutant: Mutant | PackageMutant, origin: RegisteredOperator) -> None:
    operator = mutant.build(origin.declaration)
    family = conformance(operator.declaration.family)
    subject = Subject(operator, REGISTRY, family)
    outcome = check_one(subject, family.relation(mutant.killed_by), QUICK, seed=0)
    assert outcome.status == FAILED, f"{mutant.name} survives {mutant.killed_by}"
    assert not outcome.crash, f"{mutant.name} was not judged, it crashed: {outcome.reason}"
    KILLED.append(mutant.name)


@pytest.mark.parametrize("operator", [*NAIVE.values(), TILED], ids=lambda operator: operator.title)
def test_a_correct_operator_passes(operator: RegisteredOperator) -> None:
    report = check_operator(operator, REGISTRY, QUICK)
    assert report.passed, report.failures
    left = [outcome for outcome in report.outcomes if outcome.name not in report.held]
    assert all(outcome.reason.startswith("heavy: asked on cuda") for outcome in left)
    assert report.drawn > 100 and not report.declined, "these refuse nothing that the kit draws"


@pytest.mark.thorough
@pytest.mark.parametrize("operator", NAIVE.values(), ids=lambda operator: operator.title)
def test_a_correct_operator_passes_a_thorough_look(operator: RegisteredOperator) -> None:
    report = check_operator(operator, REGISTRY, replace(PROFILES["thorough"], shrink=False), seed=1)
    assert report.passed, report.failures
    assert len(report.held) == len(report.outcomes), "no case is too heavy for it"


def test_there_are_enough_different_faults() -> None:
    by_family = {
        family: {m.name for m, origin in MUTANTS if origin.declaration.family == family} for family in FAMILIES
    }
    assert all(len(names) >= 8 for names in by_family.values())
    assert sum(map(len, by_family.values())) == len(MUTANTS) >= 40
    counts = ", ".join(f"{family} {len(names)}" for family, names in by_family.items())
    measured.lines.append(f"mutants killed by quick: {len(KILLED)} of {len(MUTANTS)} ({counts})")
    everyone = {f"{family}/{name}" for family, names in by_family.items() for name in names}
    assert {name for names in FAULTS.values() for name in names} <= everyone
