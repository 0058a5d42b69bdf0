"""MoE calls that cases are made of: given routing at the nearest dims, and experts that return what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.operators import PackedExperts
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe
from minideepinfer.testing.subject import Subject

WIDTHS = ((1, 1), (2, 1), (4, 2), (8, 4))
"""Factors on hidden and inner size that a case may run at, the wanted ones first."""


def identity_case(case: MoeCase) -> tuple[MoeCase, Tensor]:
    """A case with experts that return silu(6) times their input (channel 0 of x is 1), and what must come out.

    w1 has 6 in column 0, w3 and w2 are the identity; x is small enough for no clamp and is given in FP8's numbers.
    """
    problem, held = replace(case.problem, intermediate_size=case.problem.hidden_size), case.weights.experts
    hidden, num = problem.hidden_size, held.num_local
    codes = torch.zeros(num, 3, hidden, hidden, dtype=torch.uint8)
    codes[:, 0, :, 0] = 7
    codes[:, 1:] = torch.eye(hidden, dtype=torch.uint8) * 2
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    ones = torch.full((num, 3, hidden, hidden // 32), 127, dtype=torch.uint8)
    experts = PackedExperts(packed[:, :2], ones[:, :2], packed[:, 2], ones[:, 2], held.expert_start)
    steps = torch.arange(case.x.numel()).view(case.x.shape)
    x = ((steps * 7 % 13 - 6) / 8).to(case.x.dtype)
    x[:, 0] = 1.0
    identity = replace(
        case,
        problem=replace(problem, activation_quantization="none"),
        x=x,
        weights=replace(case.weights, experts=experts),
    )
    assert case.routing is not None
    local = case.routing[0] - held.expert_start
    here = (case.routing[0] >= 0) & (local >= 0) & (local < num)
    total = case.routing[1].double().masked_fill(~here, 0.0).sum(1, keepdim=True)
    return identity, x.double() * total * F.silu(torch.tensor(6.0, dtype=torch.float64))


def forced(subject: Subject, recipe: MoeRecipe, ids: Tensor) -> MoeCase:
    """A case with these ids, at the nearest widths that the operator serves."""

    def wider() -> Iterator[MoeCase]:
        for hidden, inner in WIDTHS:
            at = replace(
                recipe,
                hidden_size=recipe.hidden_size * hidden,
                intermediate_size=recipe.intermediate_size * inner,
                tokens=len(ids),
                topk=ids.shape[1],
            )
            case = at.build()
            weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3))
            # A row without a local expert may be NaN; the case decides which are.
            yield replace(case, x=case.x.nan_to_num(1.0), routing=(ids.int(), weights))

    return subject.nearest(wider())


def in_every_dtype(check: Callable[[Subject, str], None]) -> Callable[[Subject], None]:
    """An explicit case in each compute dtype that the operator declares."""

    def check_all(subject: Subject) -> None:
        for dtype in subject.dtypes:
            check(subject, dtype)

    return check_all


def compared(subject: Subject, case: MoeCase) -> Tensor:
    """The operator's output, compared with the reference."""
    found = subject.run(case)
    subject.family.compare(subject, case, found, subject.reference(case), 1.0)
    return found["y"]
