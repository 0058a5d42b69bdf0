"""MoE: cases M2, M3 and L2, about number formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.quantization import E4M3_MAX, encode_mxfp4
from minideepinfer.testing.contract import Violation
from minideepinfer.testing.families.moe_calls import identity_case
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe, random_experts
from minideepinfer.testing.subject import Subject

AMAXES = ((2.7, 126), (5.5, 127), (1.2, 125), (6.0, 127), (6.5, 128), (7.9, 128))
"""Largest magnitudes of blocks, and the exponent byte of each in MXFP4: rounded up, so that nothing saturates."""
WIDE = ((5120, 2304), (160, 96), (256, 128), (512, 256), (1024, 512))
"""Hidden and inner size of L2, the wanted ones first."""


def blocks_of(amaxes: Sequence[float], fill: Tensor) -> Tensor:
    """Blocks of 32 that are `fill` (within -1 and 1) times a magnitude, which one element reaches: `[n, 32]`."""
    blocks = fill * torch.tensor(amaxes)[:, None]
    blocks[:, 7] = -torch.tensor(amaxes)
    return blocks


def m3(subject: Subject) -> None:
    """Where inputs are quantised (here to FP8), a block's scale is the smallest that lets nothing saturate.

    The six blocks have the same place under E4M3's largest number as the case's have under E2M1's; experts return their
    input, so that each element shows which code it had under which scale.
    """
    amaxes = [amax for amax, _ in AMAXES]
    if encode_mxfp4(blocks_of(amaxes, torch.linspace(-0.4, 0.4, 32)))[1].flatten().tolist() != [b for _, b in AMAXES]:
        raise Violation("MXFP4 scales of the engine itself are not 126, 127, 125, 127, 128, 128")
    for dtype in subject.dtypes:
        wanted = ("released", "none")  # an operator that refuses to quantise inputs must leave them as they are
        cases = (_identities(dtype, quantization, 192 * n) for quantization in wanted for n in (1, 2, 4, 8))
        case = subject.nearest(cases)
        subject.family.compare(subject, case, subject.run(case), subject.reference(case), 1.0)


def _identities(dtype: str, quantization: str, hidden: int) -> MoeCase:
    """Identity experts on the blocks, which move on by one from row to row."""
    ids = torch.zeros(6, 1, dtype=torch.int32)
    recipe = MoeRecipe(6, dtype, quantization, hidden, hidden, num_experts=1, num_local_experts=1)
    case, _ = identity_case(replace(recipe.build(), routing=(ids, torch.ones(6, 1))))
    ladder = torch.cat([2.0 ** -torch.arange(16.0), torch.tensor([1.0, 2.0, 3.0, 5.0] * 4) * 2.0**-18])
    blocks = blocks_of([amax * E4M3_MAX / 6 / 128 for amax, _ in AMAXES], ladder)
    x = torch.stack([blocks[(torch.arange(hidden // 32) + row) % 6].flatten() for row in range(6)])
    x[:, 0] = 0.5
    return replace(
        case,
        problem=replace(case.problem, activation_quantization=quantization),
        x=x.to(case.x.dtype),
        routing=(ids, torch.full((6, 1), 1 / float(F.silu(torch.tensor(3.0))))),
    )


def packed_twice_as_wide(subject: Subject) -> None:
    """L2: w1 of 2304 x 2560 bytes with 160 scales a row, which alternate, so that other columns give other numbers."""
    ids = torch.zeros(2, 1, dtype=torch.int64)

    def cases() -> Iterator[MoeCase]:
        for dtype in subject.dtypes:
            for hidden, inner in WIDE[subject.interpreted :]:
                yield _alternating(MoeRecipe(2, dtype, "none", hidden, inner, 1, 1), ids)

    case = subject.nearest(cases())
    subject.family.compare(subject, case, subject.run(case), subject.reference(case), 1.0)


def _alternating(recipe: MoeRecipe, ids: Tensor) -> MoeCase:
    case = recipe.build()
    experts = random_experts(1, recipe.hidden_size, recipe.intermediate_size, torch.Generator().manual_seed(5))
    for scale in (experts.w13_scale, experts.w2_scale):
        scale[:] = (119 + 6 * (torch.arange(scale.shape[-1]) % 2)).to(torch.uint8)
    return replace(
        case,
        x=case.x.nan_to_num(1.0),
        weights=replace(case.weights, experts=experts),
        routing=(ids.int(), torch.ones(ids.shape)),
    )
