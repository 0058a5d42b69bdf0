"""MoE: cases M2, M3 and L2, about number formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.operators import PackedExperts
from minideepinfer.quantization import E4M3_MAX, decode_e2m1, encode_mxfp4
from minideepinfer.testing.contract import Violation
from minideepinfer.testing.families.moe_calls import forced, identity_case
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe, random_experts
from minideepinfer.testing.subject import Subject

AMAXES = ((2.7, 126), (5.5, 127), (1.2, 125), (6.0, 127), (6.5, 128), (7.9, 128))
"""Largest magnitudes of blocks, and the exponent byte of each in MXFP4: rounded up, so that nothing saturates."""
WIDE = ((5120, 2304), (160, 96), (256, 128), (512, 256), (1024, 512))
"""Hidden and inner size of L2, the wanted ones first."""


def m2(subject: Subject, dtype: str) -> None:
    """All 16 codes under all 256 exponents, in w2: what comes out shows the decoded numbers."""
    recipe = MoeRecipe(1, dtype, hidden_size=4096, intermediate_size=96, num_experts=1, num_local_experts=1)
    case = forced(subject, recipe, torch.zeros(1, 1, dtype=torch.int64))
    hidden, inner = case.problem.hidden_size, case.problem.intermediate_size
    w13 = torch.zeros(1, 2, inner, hidden // 2, dtype=torch.uint8)
    w13[0, :, 0, 0] = 0x02  # w1[0, 0] = w3[0, 0] = 1
    w2 = torch.zeros(1, hidden, inner // 2, dtype=torch.uint8)
    w2_scale = torch.full((1, hidden, inner // 32), 127, dtype=torch.uint8)
    codes, exponents = torch.arange(4096) % 16, torch.arange(4096) // 16
    w2[0, :4096, 0], w2_scale[0, :4096, 0] = codes.to(torch.uint8), exponents.to(torch.uint8)
    experts = PackedExperts(w13, torch.full((1, 2, inner, hidden // 32), 127, dtype=torch.uint8), w2, w2_scale)
    x = torch.zeros_like(case.x)
    x[0, 0] = 1.0
    weight = 1.0 / F.silu(torch.tensor(1.0))
    case = replace(
        case,
        x=x,
        weights=replace(case.weights, experts=experts),
        routing=(case.routing[0], weight.view(1, 1)),  # type: ignore[index]
    )
    y = subject.run(case)["y"][0, :4096]
    values = decode_e2m1(codes.to(torch.uint8), torch.float64) * 2.0 ** (exponents.double() - 127)
    expected = values.to(torch.float32).masked_fill(exponents == 255, torch.nan).to(y.dtype)
    wrong = y.isnan() != expected.isnan()
    # What goes into w2 is 1 up to the last bit of silu; subnormal results lose bits of their own, in bfloat16 all.
    slack = 2.0**-128 if y.dtype is torch.float32 else 2.0**-126
    wrong |= (y.double() - expected.double()).abs() > 2.0**-7 * expected.double().abs() + slack
    if subject.properties.deterministic and y.dtype is torch.float32:
        reference = subject.reference(case)["y"][0, :4096]
        normal = expected.abs() >= 2.0**-126
        wrong |= normal & ((y - reference).abs() > 2.0**-22 * reference.abs())
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise Violation(
            f"code {int(codes[at])} with exponent {int(exponents[at])} is {float(y[at])}, not {float(expected[at])}"
        )


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
