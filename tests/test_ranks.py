"""Several ranks in the conformance kit: those of one process, and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_plugins import declaration
from minideepinfer.operators import OperatorRegistry, RegisteredOperator, Tier, load_registry
from minideepinfer.testing import processes
from minideepinfer.testing.checking import FAILED, PASSED, check_one, check_operator
from minideepinfer.testing.contract import Violation
from minideepinfer.testing.families.comm_ranks import check_comm, scenarios
from minideepinfer.testing.ranks import RankComm, World
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tolerances import conformance

QUICK = replace(PROFILES["quick"], examples=3, shrink=False)
X, IDS, WEIGHTS = torch.ones(2, 4), torch.tensor([[0], [1]], dtype=torch.int32), torch.ones(2, 1)


@pytest.fixture(scope="module")
def registry() -> OperatorRegistry:
    return load_registry()


# Ranks of one process


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_of_one_process_keep_the_contract(size: int, packed: bool, dtype: str) -> None:
    for scenario in scenarios(size, dtype):
        world = World(size, 2 * size, packed=packed)
        check_comm(lambda cases, world=world: world.run(lambda comm: cases[comm.rank].run(comm)), scenario)


def test_what_nobody_sends_is_nan() -> None:
    def work(comm: RankComm) -> torch.Tensor:
        dispatched = comm.dispatch(X, IDS, WEIGHTS).wait()
        return dispatched.x

    first, second = World(2, 2).run(work)
    assert first.isnan()[:, 0].tolist() == [False, True, False, True]
    assert second.isnan()[:, 0].tolist() == [True, False, True, False]
    assert [x.shape[0] for x in World(2, 2, packed=True).run(work)] == [2, 2]


def leaves(comm: RankComm) -> None:
    if comm.rank:
        comm.dispatch(X, IDS, WEIGHTS)


def confuses(comm: RankComm) -> None:
    comm.all_gather(X, [2, 2]) if comm.rank else comm.dispatch(X, IDS, WEIGHTS)


def miscounts(comm: RankComm) -> None:
    comm.all_gather(X, [2, 3])


def forgets_a_row(comm: RankComm) -> None:
    dispatched = comm.dispatch(X, IDS, WEIGHTS).wait()
    comm.combine(dispatched.x[1:], dispatched.handle)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (leaves, "rank 0 has returned, but rank 1 in dispatch waits for it"),
        (confuses, "the ranks call different collectives: dispatch, all_gather"),
        (miscounts, r"all_gather was given rows \[2, 2\] by the ranks, but counts \[2, 3\]"),
        (forgets_a_row, r"combine was given torch.float32 \[3, 4\]; float32 \[4, hidden\] is needed"),
    ],
)
def test_ranks_that_do_not_meet_are_noticed(work: Callable[[RankComm], None], message: str) -> None:
    with pytest.raises(Violation, match=message):
        World(2, 2).run(work)


def test_the_first_fault_is_what_a_world_raises() -> None:
    def work(comm: RankComm) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("rank 2")
        comm.all_gather(X, [2] * 4)

    with pytest.raises(ZeroDivisionError, match="rank 2"):
        World(4, 4).run(work)


# Processes


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    for group in list(processes._STARTED.values()):
        group.close()


def gloo(name: str = "gloo", build: str = "build") -> RegisteredOperator:
    def refuses(problem: Any) -> list[str]:
        return ["has world size 1, needs more"] if problem.world_size == 1 else []

    found = declaration(name, "comm", build=f"gloo_comm:{build}", refuses=refuses, tier=Tier.EXPERIMENTAL)
    return RegisteredOperator(found, "odd", "1", "comm")


def with_gloo(registry: OperatorRegistry, operator: RegisteredOperator) -> OperatorRegistry:
    """Of our own comm operators only `single` beside it."""
    every = [o for family in ("attention", "indexer", "moe") for o in registry.operators(family)]
    return OperatorRegistry([*every, registry.get("comm", "single"), operator])


def check(registry: OperatorRegistry, operator: RegisteredOperator, name: str) -> Any:
    subject = Subject(operator, with_gloo(registry, operator), conformance("comm"))
    return check_one(subject, subject.family.relation(name), QUICK, 0), subject


@pytest.mark.parametrize("name", ["C1", "M4"])
def test_a_comm_operator_between_processes(registry: OperatorRegistry, name: str) -> None:
    outcome, subject = check(registry, gloo(), name)
    assert outcome.status == PASSED, outcome.reason
    assert subject.tally.ran == 2 * {"C1": 8, "M4": 4}[name] * (2 + 4)
    assert list(subject.tally.refused) == ["has world size 1, needs more"]


def test_experts_over_processes(registry: OperatorRegistry) -> None:
    outcome, subject = check(registry, gloo(), "moe-and-comm")
    assert outcome.status == PASSED, outcome.reason
    assert list(subject.tally.refused) == ["has world size 1, needs more"]
    moe = registry.get("moe", "naive")
    judge = Subject(moe, with_gloo(registry, gloo()), conformance("moe"))
    assert check_one(judge, judge.family.relation("moe-and-comm"), QUICK, 0).status == PASSED
    assert judge.tally.ran == 2 * 2 * (1 + 2 + 4), "on one rank with `single`"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("build_wrong", "y at"),
        ("build_raising", "rank 1 of 2 raised ValueError: no route to host"),
        ("build_dying", "rank 1 of 2 has ended"),
    ],
)
def test_a_fault_between_processes_is_told(registry: OperatorRegistry, build: str, message: str) -> None:
    outcome, _ = check(registry, gloo(build.replace("_", "-"), build), "moe-and-comm")
    assert outcome.status == FAILED and message in outcome.reason


def test_single_refuses_several_ranks_with_a_reason(registry: OperatorRegistry) -> None:
    report = check_operator(registry.get("comm", "single"), registry, QUICK)
    assert report.passed and {"C1", "M4", "moe-and-comm"} <= set(report.held)
    assert set(report.refused) == {"has world size 2, needs 1", "has world size 4, needs 1"}
