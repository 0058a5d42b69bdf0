"""What test processes do with comm operators; imported by name there."""

from __future__ import annotations

import os
from typing import Any

import torch
from minideepinfer.errors import OperatorError
from minideepinfer.operators import CommProblem, PlannedOperator, build, load_registry
from minideepinfer.testing.recipes.batch import context, facts
from minideepinfer.testing.recipes.moe import MoeCase
from minideepinfer.testing.recipes.ranks import SHARD, RankCase
from minideepinfer_moe import naive
from torch import Tensor

_BUILT: dict[tuple[str, CommProblem], Any] = {}


def operator(name: str, problem: CommProblem) -> Any:
    """A comm operator of this process."""
    if (name, problem) not in _BUILT:
        registered = load_registry().get("comm", name)
        planned = PlannedOperator(registered, registered.declaration.options(), problem, "explicit: test", {})
        _BUILT[name, problem] = build(planned, torch.device("cpu"))
    return _BUILT[name, problem]


def traffic(rank: int, work: tuple[str, RankCase]) -> dict[str, int]:
    """Bytes that each call sends."""
    name, case = work
    comm, sent = operator(name, case.problem), {}

    def since(call: str, before: int) -> None:
        sent[call] = comm.sent_bytes - before

    before = comm.sent_bytes
    exchange = comm.prepare(case.counts)
    since("prepare", before)
    before = comm.sent_bytes
    dispatched = exchange.dispatch(case.x, case.topk_ids, case.topk_weights).wait()
    since("dispatch", before)
    before = comm.sent_bytes
    exchange.combine(torch.zeros(dispatched.x.shape), dispatched.handle).wait()
    since("combine", before)
    before = comm.sent_bytes
    comm.all_gather(case.x, case.counts)
    since("all_gather", before)
    before = comm.sent_bytes
    comm.reduce_scatter(case.summands, case.counts)
    since("reduce_scatter", before)
    before = comm.sent_bytes
    comm.fetch_rows(case.tables, case.row_ids, SHARD).wait()
    since("fetch_rows", before)
    return sent


def experts(rank: int, work: tuple[str, CommProblem, tuple[int, ...], MoeCase]) -> dict[str, Tensor]:
    """The reference experts behind a comm operator: their output, and what this rank was given to compute."""
    name, problem, counts, case = work
    exchange = operator(name, problem).prepare(counts)
    moe = naive.build(context(case.problem))
    routing = case.routing or moe.route(case.x, case.weights)
    dispatched = exchange.dispatch(case.x, *routing).wait()
    exchange.combine(torch.zeros(dispatched.x.shape), dispatched.handle).wait()
    held = case.weights.experts
    local = dispatched.topk_ids - held.expert_start
    here = (local >= 0) & (local < held.num_local)
    return {
        "y": case.run(moe, exchange),
        "ids": dispatched.topk_ids.masked_fill(~here, -1)[here.any(1)],
        "weights": dispatched.topk_weights.masked_fill(~here, 0.0)[here.any(1)],
        "x": dispatched.x[here.any(1)],
    }


def overlapping(rank: int, size: int) -> list[list[int]]:
    """Several things on their way at once, waited for in another order; what each brought, as numbers."""
    comm = operator("collective", small(size))
    exchange = comm.prepare([1] * size)
    ids, weights = torch.full((1, 1), rank, dtype=torch.int32), torch.ones(1, 1)
    journeys = [exchange.dispatch(torch.full((1, 4), 10.0 * number + rank), ids, weights) for number in range(5)]
    return [journey.wait().x[:, 0].int().tolist() for journey in reversed(journeys)]


def small(size: int) -> CommProblem:
    """A problem of so many ranks."""
    return CommProblem(**facts(torch.float32), hidden_size=4, num_experts=size, world_size=size)


def wrong_size(rank: int, size: int) -> str:
    """What an operator says that is planned for more ranks than there are."""
    operator("collective", small(size))
    try:
        operator("collective", small(size + 1))
    except OperatorError as error:
        return str(error)
    return ""


def left_alone(rank: int, size: int) -> None:
    """The last rank ends while the others wait for it."""
    comm = operator("collective", small(size))
    if rank == size - 1:
        os._exit(3)
    comm.all_gather(torch.ones(1, 4), [1] * size)
