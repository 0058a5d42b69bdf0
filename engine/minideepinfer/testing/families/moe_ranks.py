"""MoE operators on several ranks: the relation `ranks-together` and the parts of M4 and C1 that need ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import PackedExperts
from minideepinfer.testing.contract import Outputs, Violation
from minideepinfer.testing.ranks import RankComm, World
from minideepinfer.testing.recipes.moe import MoeCase, held_experts
from minideepinfer.testing.subject import Subject, difference
from minideepinfer.testing.tensors import same_bits

Shares = Sequence[Sequence[int]]
"""For each rank the tokens that it brings."""


def on_ranks(whole: MoeCase, shares: Shares) -> list[MoeCase]:
    """A call of one rank as several ranks make it: each with its experts and its tokens.

    Args:
        whole: a case whose experts are all there, as many as the ranks can share evenly.
        shares: the tokens of each rank.
    """
    size, num_experts = len(shares), whole.problem.num_experts
    each = num_experts // size
    problem = replace(whole.problem, num_local_experts=each, world_size=size)
    cases = []
    for rank, tokens in enumerate(shares):
        taken, _ = whole.take(tokens)
        experts = held_experts(whole.weights.experts, rank * each, (rank + 1) * each)
        cases.append(replace(taken, problem=problem, weights=replace(whole.weights, experts=experts)))
    return cases


def run_on_ranks(subject: Subject, whole: MoeCase, shares: Shares, **world: Any) -> list[Tensor]:
    """What each rank returns for its tokens; `world` are settings of `World`."""
    cases = on_ranks(whole, shares)
    found = subject.run_together(cases, World(len(shares), whole.problem.num_experts, **world), _call)
    for rank, (case, outputs) in enumerate(zip(cases, found, strict=True)):
        if outputs["y"].shape != case.x.shape:
            raise Violation(f"rank {rank} of {len(shares)}: y: {difference(outputs['y'], case.x)}")
    return [outputs["y"] for outputs in found]


def _call(operator: Any, case: MoeCase, comm: RankComm) -> Outputs:
    return {"y": case.run(operator, comm)}


def check_ranks(subject: Subject, whole: MoeCase, shares: Shares) -> None:
    """Several ranks give, together, what the reference gives on one; however `dispatch` brings the tokens."""
    taken, _ = whole.take([token for share in shares for token in share])
    expected = subject.reference(taken)
    for packed in (False, True):
        y = torch.cat(run_on_ranks(subject, whole, shares, packed=packed))
        try:
            subject.family.compare(subject, taken, {"y": y}, expected, 1.0)
        except Violation as violation:
            brought = "only tokens with an expert here" if packed else "a row for every token"
            raise Violation(f"on {len(shares)} ranks, to which dispatch brings {brought}: {violation}") from None


def check_unsent_rows(subject: Subject, whole: MoeCase, shares: Shares) -> None:
    """Rows that nobody sends may hold NaN without changing a bit (within the bound if not deterministic)."""
    taken, _ = whole.take([token for share in shares for token in share])
    nan, zero = (torch.cat(run_on_ranks(subject, whole, shares, unsent=value)) for value in (torch.nan, 0.0))
    if subject.properties.deterministic and not same_bits(nan, zero):
        raise Violation(f"rows that nobody sends matter: {difference(nan, zero)}")
    subject.family.compare(subject, taken, {"y": nan}, subject.reference(taken), 1.0)


def all_experts_here(case: MoeCase, size: int) -> MoeCase:
    """A case of some local experts as a model that has no others, cut to a number that `size` ranks share evenly."""
    held = case.weights.experts
    count = held.num_local // size * size
    experts: PackedExperts = replace(held_experts(held, 0, count), expert_start=0)
    start = held.expert_start
    weights = replace(
        case.weights,
        experts=experts,
        gate=case.weights.gate[start : start + count],
        gate_bias=case.weights.gate_bias[start : start + count],
    )
    problem = replace(case.problem, num_experts=count, num_local_experts=count, topk=min(case.problem.topk, count))
    routing = case.routing
    if routing is not None:
        ids = routing[0] - held.expert_start
        ids = ids.masked_fill((routing[0] < 0) | (ids < 0) | (ids >= count), -1)
        routing = (ids[:, : problem.topk], routing[1][:, : problem.topk])
    return replace(case, problem=problem, weights=weights, routing=routing)


def ranks_together(subject: Subject, case: MoeCase) -> None:
    """2 and 4 ranks with ragged shares of the tokens give, together, what one rank gives."""
    for number, size in enumerate((2, 4)):
        if case.weights.experts.num_local < size:
            continue
        ragged = [range(case.units)[rank::size] for rank in range(size)]
        all_on_the_last = [range(0)] * (size - 1) + [range(case.units)]
        shares = (ragged, all_on_the_last)[(case.units + number) % 2]
        check_ranks(subject, all_experts_here(case, size), shares)


def split(tokens: int, counts: Sequence[int]) -> Shares:
    """Consecutive tokens, so many for each rank."""
    assert sum(counts) == tokens
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
