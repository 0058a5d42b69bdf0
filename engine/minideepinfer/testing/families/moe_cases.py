"""MoE: edge cases tried first, and the explicit cases."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.families.comm_ranks import with_comm
from minideepinfer.testing.families.moe_calls import compared, forced, in_every_dtype
from minideepinfer.testing.families.moe_formats import m3, packed_twice_as_wide
from minideepinfer.testing.families.moe_ranks import check_ranks, check_unsent_rows, on_ranks, split
from minideepinfer.testing.families.whole_model import END_TO_END, L1, L2
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe, random_experts
from minideepinfer.testing.subject import Subject, difference
from minideepinfer.testing.tensors import same_bits

_FOUR = MoeRecipe(tokens=4, num_experts=5, num_local_experts=3, expert_start=1, topk=2)
_WIDE = replace(_FOUR, tokens=24, dtype="bfloat16", hidden_size=256, intermediate_size=128)
"""Widths at which operators for tensor cores take their own path."""

EDGES = (
    MoeRecipe(tokens=0),
    MoeRecipe(tokens=0, routing="gate", shared=True),
    MoeRecipe(),
    MoeRecipe(tokens=3, routing="none", shared=True),
    MoeRecipe(tokens=3, routing="none"),
    MoeRecipe(tokens=2, routing="remote", num_experts=4),
    replace(_FOUR, routing="one"),
    MoeRecipe(tokens=6, num_experts=5, num_local_experts=5, topk=4),
    MoeRecipe(tokens=6, num_local_experts=1, hidden_size=96, intermediate_size=96, amplitude=20.0),
    MoeRecipe(tokens=6, routing="gate", num_experts=3, topk=2, amplitude=20.0),
    replace(_FOUR, routing="twice"),
    replace(_FOUR, hidden_size=96, intermediate_size=96),
    replace(_FOUR, routing="gate", shared=True),
    replace(_FOUR, routing="gate", few=True, tokens=6, topk=3),
    replace(_FOUR, routing="gate", few=True, tokens=6, topk=1),
    replace(_FOUR, amplitude=20.0, shared=True),
    replace(_FOUR, amplitude=1e4, shared=True, routing="gate"),
    replace(_FOUR, amplitude=1e-39, shared=True, routing="gate"),  # subnormal x
    replace(_FOUR, amplitude=1e-39, activation_quantization="released"),
    replace(_FOUR, tokens=7, topk=3, hidden_size=160, intermediate_size=224),
    replace(_FOUR, activation_quantization="released", shared=True),
    replace(_FOUR, activation_quantization="released", routing="gate"),
    replace(_WIDE, shared=True),
    replace(_WIDE, activation_quantization="released"),
    replace(_WIDE, activation_quantization="released", routing="one"),
)


def m1(subject: Subject, dtype: str) -> None:
    """Experts without tokens hold NaN; so does memory of the output's size."""
    ids = torch.tensor([[1], [3], [1], [1], [3], [1], [3], [1]])
    recipe = MoeRecipe(8, dtype, hidden_size=64, intermediate_size=96, num_experts=6, num_local_experts=6)
    case = forced(subject, recipe, ids)
    for unused in (0, 2, 4, 5):
        case.weights.experts.w13_scale[unused] = 255
        case.weights.experts.w2_scale[unused] = 255
    outputs = []
    for _ in range(2):
        block = torch.full(case.x.shape, torch.nan, device=subject.device)
        del block
        outputs.append(compared(subject, case))
    if subject.properties.deterministic and not same_bits(*outputs):
        raise Violation("two runs have other bits")


def m4(subject: Subject, dtype: str) -> None:
    """Rows without a local expert are NaN, on single ranks of four, and on four ranks together."""
    for tokens, topk in ((1, 1), (1, 6), (5, 4), (300, 6)):
        generator = torch.Generator().manual_seed(tokens * 10 + topk)
        ids = torch.stack([torch.randperm(8, generator=generator)[:topk] for _ in range(tokens)])
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        recipe = MoeRecipe(dtype=dtype, hidden_size=1056, intermediate_size=96, num_experts=8, num_local_experts=8)
        for rank in (0, 3):
            _m4_alone(subject, replace(recipe, num_local_experts=2, expert_start=2 * rank), ids, generator)
        if tokens < 300 or not subject.interpreted:
            for whole in _on_four(subject, recipe, ids):
                shares = [range(tokens)[rank::4] for rank in range(4)]
                check_unsent_rows(subject, _every_byte(whole, generator), shares)


def _m4_alone(subject: Subject, recipe: MoeRecipe, ids: Tensor, generator: torch.Generator) -> None:
    case = _every_byte(forced(subject, recipe, ids), generator)
    remote = ~case.local_rows()[:, None]
    zeroed = replace(case, x=case.x.masked_fill(remote, 0.0))
    poisoned = replace(case, x=case.x.masked_fill(remote, torch.nan))
    found, expected = compared(subject, poisoned), subject.run(zeroed)["y"]
    if subject.properties.deterministic and not same_bits(found, expected):
        raise Violation(f"remote rows matter: {difference(found, expected)}")
    if not bool((found[remote[:, 0]] == 0).all()):
        raise Violation("a row without a local expert is not zero")


def _every_byte(case: MoeCase, generator: torch.Generator) -> MoeCase:
    """The case with other experts, among whose codes is every byte."""
    held, problem = case.weights.experts, case.problem
    sizes = (held.num_local, problem.hidden_size, problem.intermediate_size)
    experts = random_experts(*sizes, generator, held.expert_start)
    count = min(256, problem.hidden_size // 2)
    experts.w13[0, 0, 0, :count] = torch.arange(256, dtype=torch.uint8)[:count]
    return replace(case, weights=replace(case.weights, experts=experts))


def _on_four(subject: Subject, recipe: MoeRecipe, ids: Tensor) -> list[MoeCase]:
    """A case of one rank that the operator serves as one of four; none if it serves no dims of several ranks."""
    whole = forced(subject, recipe, ids)
    return [whole] if subject.serves(on_ranks(whole, [[]] * 4)[0].problem) else []


def c1(subject: Subject, dtype: str) -> None:
    """No token, tokens anywhere, and every token on the last experts: on one rank, and on four with 3, 0, 0, 1."""
    recipe = MoeRecipe(dtype=dtype, num_experts=8, num_local_experts=8)
    for ids in ([[0, 7], [3, 3], [5, -1], [6, 2]], [[6, 7]] * 4):
        case = forced(subject, recipe, torch.tensor(ids))
        compared(subject, case)
        empty, _ = case.take([])
        if compared(subject, empty).shape != (0, case.problem.hidden_size):
            raise Violation("no tokens must give [0, hidden]")
        for whole in _on_four(subject, recipe, torch.tensor(ids)):
            check_ranks(subject, whole, split(4, (3, 0, 0, 1)))
            check_ranks(subject, whole, split(0, (0, 0, 0, 0)))


def l2(subject: Subject) -> None:
    """A checkpoint, and the operator itself, take 32 logical columns for one scale."""
    L2.check(subject)
    packed_twice_as_wide(subject)


CASES = (
    ExplicitCase("M1", "experts without tokens: rows that stay unwritten, weights that are read", in_every_dtype(m1)),
    ExplicitCase("M3", "a scale exponent that is truncated, so that a block's largest number saturates", m3),
    ExplicitCase("M4", "rows of other ranks that are read; widths that are no multiple of a tile", in_every_dtype(m4)),
    ExplicitCase("C1", "a rank without tokens that leaves out a collective, or returns nothing", in_every_dtype(c1)),
    ExplicitCase("moe-and-comm", "a dispatch that brings what the experts do not expect", with_comm),
    L1,
    ExplicitCase(L2.name, L2.fault, l2),
    END_TO_END,
)
