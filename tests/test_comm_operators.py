"""`collective` and `all_to_all` between processes: the same numbers, and no more bytes than they say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import comm_work
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from minideepinfer.errors import OperatorError
from minideepinfer.operators import CommProblem, PlannedOperator, Stage, build, load_registry
from minideepinfer.testing import processes
from minideepinfer.testing.families.comm_ranks import comm_problem
from minideepinfer.testing.families.moe_ranks import on_ranks, split
from minideepinfer.testing.processes import started
from minideepinfer.testing.recipes.batch import context, facts
from minideepinfer.testing.recipes.moe import MoeRecipe
from minideepinfer.testing.recipes.ranks import SHARD, RankCase, RanksRecipe
from minideepinfer_comm.options import refuses_uneven
from minideepinfer_comm.symmetric import read_rows
from minideepinfer_moe import naive

SIZES = (2, 4)


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    for group in list(processes._STARTED.values()):
        group.close()


def recipes(size: int) -> st.SearchStrategy[RanksRecipe]:
    """Tokens of so many ranks."""
    return st.builds(
        RanksRecipe,
        counts=st.tuples(*[st.sampled_from([0, 0, 1, 2, 7])] * size),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        hidden_size=st.sampled_from([1, 32, 103]),
        topk=st.integers(1, 6),
        routing=st.sampled_from(["any", "any", "first", "last", "none"]),
        seed=st.integers(0, 1000),
    )


# Bytes


def owners(case: RankCase) -> torch.Tensor:
    """bool `[T, ranks]`, which ranks own an expert of a token; 2 experts on each."""
    ids = case.topk_ids
    return torch.stack([((ids >= 0) & (ids // 2 == rank)).any(1) for rank in range(len(case.counts))], 1)


def sent_by_all_to_all(cases: Sequence[RankCase], rank: int) -> tuple[int, int]:
    """What `SentTokens` says of dispatch and of combine."""
    case, others = cases[rank], [other for other in range(len(cases)) if other != rank]
    row = case.x.shape[1] * case.x.element_size() + 8 * case.topk_ids.shape[1]
    sent = int(owners(case)[:, others].sum())
    came = sum(int(owners(cases[other])[:, rank].sum()) for other in others)
    return sent * row + 8 * len(others), came * 4 * case.x.shape[1]


def sent_by_collective(cases: Sequence[RankCase], rank: int) -> tuple[int, int]:
    """What `GatheredTokens` says of dispatch and of combine."""
    case = cases[rank]
    row = case.x.shape[1] * case.x.element_size() + 8 * case.topk_ids.shape[1]
    others = sum(case.counts) - case.counts[rank]
    return (len(cases) - 1) * case.counts[rank] * row, others * case.x.shape[1] * 4


def sent_for_rows(cases: Sequence[RankCase], rank: int) -> int:
    """What `rows.fetch_rows` says: questions, how many, and answers from the rank's own shard."""
    own = cases[rank].row_ids.unique() // SHARD
    asked_by_others = sum(int((case.row_ids.unique() // SHARD == rank).sum()) for case in cases if case.rank != rank)
    row_bytes = sum(table.shape[1] for table in cases[rank].tables)
    return 8 * int((own != rank).sum()) + 8 * (len(cases) - 1) + row_bytes * asked_by_others


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "formula"), [("collective", sent_by_collective), ("all_to_all", sent_by_all_to_all)])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_operators_send_what_they_say(name: str, formula: object, size: int, data: st.DataObject) -> None:
    cases = data.draw(recipes(size)).build()
    found = started(size).call(comm_work.traffic, [(name, case) for case in cases])
    for rank, (case, sent) in enumerate(zip(cases, found, strict=True)):
        dispatch, combine = formula(cases, rank)  # type: ignore[operator]
        rows = case.summands[0].nbytes if len(case.summands) else 0
        assert sent == {
            "prepare": 0,
            "dispatch": dispatch,
            "combine": combine,
            "all_gather": (size - 1) * case.x.nbytes,
            "reduce_scatter": (sum(case.counts) - case.counts[rank]) * rows,
            "fetch_rows": sent_for_rows(cases, rank),
        }


# Numbers


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_both_bring_the_same_tokens_and_sums(size: int, data: st.DataObject) -> None:
    """And those of one rank within 1e-5; nothing is rounded to bfloat16."""
    counts = data.draw(st.tuples(*[st.sampled_from([0, 0, 1, 3])] * size))
    given_routing = data.draw(st.sampled_from(["gate", "any", "one", "none", "twice"]))
    whole = MoeRecipe(
        tokens=sum(counts),
        num_experts=8,
        num_local_experts=8,
        topk=3,
        routing=given_routing,
        shared=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 1000)),
    ).build()
    cases, problem = on_ranks(whole, split(whole.units, counts)), comm_problem(whole, size)
    collective, all_to_all = (
        started(size).call(comm_work.experts, [(name, problem, counts, case) for case in cases])
        for name in ("collective", "all_to_all")
    )
    expected = whole.run(naive.build(context(whole.problem)), comm_work.operator("single", comm_problem(whole, 1)))
    for one, other, wanted in zip(collective, all_to_all, expected.split(counts), strict=True):
        for name in ("x", "ids", "weights"):
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(one["y"], other["y"], rtol=1e-6, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(one["y"], wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_is_on_its_way_at_once_is_not_confused() -> None:
    for found in started(2).call(comm_work.overlapping, [2, 2]):
        assert found == [[40, 41], [30, 31], [20, 21], [10, 11], [0, 1]]


@pytest.mark.parametrize("width", [256, 8, 7, 1])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_rows_are_read_by_address(width: int, count: int) -> None:
    """The kernel of `symmetric`, interpreted; all shards are in this process."""
    shards = [torch.randint(0, 256, (40, width), dtype=torch.uint8) for _ in range(3)]
    addresses = torch.tensor([shard.data_ptr() for shard in shards])
    ids = torch.randint(0, 120, (count,))
    assert torch.equal(read_rows(addresses, ids, width, 40), torch.cat(shards)[ids])


def test_waiting_is_told_to_the_clock() -> None:
    class Noting:
        def __init__(self) -> None:
            self.stages: list[str] = []

        def stage(self, name: str) -> AbstractContextManager[None]:
            self.stages.append(name)
            return nullcontext()

    clock, registered = Noting(), load_registry().get("comm", "collective")
    planned = PlannedOperator(registered, registered.declaration.options(), comm_work.small(1), "explicit: test", {})
    exchange = build(planned, torch.device("cpu"), clock).prepare([1])
    arriving = exchange.dispatch(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    assert clock.stages == []
    exchange.combine(arriving.wait().x, None).wait()
    assert clock.stages == [Stage.COMMUNICATION] * 2


# Mistakes


def test_a_group_of_another_size_is_told() -> None:
    for message in started(2).call(comm_work.wrong_size, [2, 2]):
        assert message == "comm: the process group has 2 ranks, the plan is for 3"


def test_uneven_experts_are_refused() -> None:
    problem = CommProblem(**facts(torch.float32), hidden_size=4, num_experts=6, world_size=4)
    assert refuses_uneven(problem) == ["has 6 experts on 4 ranks, needs as many on each"]


def test_a_rank_that_is_gone_is_an_error_at_once() -> None:
    with pytest.raises(OperatorError) as caught:
        started(2).call(comm_work.left_alone, [2, 2])
    assert "rank 1 of 2 has ended" in str(caught.value) and "rank 0 of 2 waits in vain" in str(caught.value)
