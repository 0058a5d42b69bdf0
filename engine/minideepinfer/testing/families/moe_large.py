"""MoE: every code and exponent (M2), rows of other ranks (M4), weights past 2^31 elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import MoeWeights, PackedExperts
from minideepinfer.quantization import decode_e2m1, pack_e2m1
from minideepinfer.testing.contract import ExplicitCase, Unavailable, Violation
from minideepinfer.testing.families.moe_cases import WIDTHS, forced, output
from minideepinfer.testing.recipes.batch import facts
from minideepinfer.testing.recipes.far import past_int32, rows_before
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe, moe_problem, random_experts
from minideepinfer.testing.relations import tile_borders
from minideepinfer.testing.subject import Subject, difference


def m2(subject: Subject) -> None:
    """Every code under every exponent, in either nibble, and every byte, in w2 and in w3; bitwise."""
    for dtype in subject.dtypes:
        for make in (_codes_in_w2, _codes_in_w3):
            case = subject.nearest(make(dtype, *widths)[0] for widths in WIDTHS)
            expected = make(dtype, 1, 1)[1].to(case.x.dtype)  # what is wider shows more of the same
            found = subject.run(case)["y"][:, : expected.shape[1]]
            same = (found == expected) | (found.isnan() & expected.isnan())
            if dtype != "float32":  # bfloat16 units may flush; in float32, 2^-127 is a number
                same |= (found == 0) & (expected.abs() < 2.0**-126)
            if not bool(same.all()):
                token, column = (~same).nonzero()[0].tolist()
                numbers = f"{float(found[token, column])!r} instead of {float(expected[token, column])!r}"
                raise Violation(f"{make.__name__[-2:]} shown by token {token} in column {column}, {dtype}: {numbers}")


def _shown(experts: PackedExperts, tokens: Tensor, ids: Tensor, dtype: str) -> MoeCase:
    """A call out of which decoded numbers come as they are.

    silu(32) is 32, in w1's first column; the routing weight 1/32 undoes it; the clamp, at 64, is far away; x is 0 or 1.
    """
    num, hidden, inner, real = experts.num_local, tokens.shape[1], experts.w13.shape[2], getattr(torch, dtype)
    problem = moe_problem(hidden, inner, num, num, 1, **facts(real))
    return MoeCase(
        problem=replace(problem, num_shared_experts=0, swiglu_limit=64.0),
        x=tokens.to(real),
        weights=MoeWeights(torch.zeros(num, hidden).bfloat16(), torch.zeros(num), experts, None),
        routing=(ids.int()[:, None], torch.full((len(ids), 1), 1 / 32)),
    )


def _values(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 numbers; 255 is NaN."""
    values = decode_e2m1(codes.to(torch.uint8), torch.float64) * torch.exp2(exponents.double() - 127)
    return values.masked_fill(exponents == 255, torch.nan).float()


def _codes_in_w2(dtype: str, wide: int, deep: int) -> tuple[MoeCase, Tensor]:
    """A call, and the numbers of its first columns, `[T, n]`.

    Experts 0 and 1 have the 16 codes under the 256 exponents in the low and in the high nibble, 2 and 3 all bytes.

    Token e visits expert e. It shows column 0 of w2 by experts 0 and 2, column 1 by experts 1 and 3.
    """
    hidden, inner, num = wide * 4096, deep * 96, 4
    rows = torch.arange(hidden)
    codes = torch.zeros(num, hidden, inner, dtype=torch.uint8)
    exponents = torch.full((num, hidden, inner // 32), 127, dtype=torch.uint8)
    w13 = torch.zeros(num, 2, inner, hidden, dtype=torch.uint8)
    w13_scale = torch.full((num, 2, inner, hidden // 32), 127, dtype=torch.uint8)
    for expert in range(num):
        if expert < 2:
            codes[expert, :, expert] = rows % 16
            exponents[expert, :, 0] = rows // 16 % 256
        else:
            codes[expert, :, 0], codes[expert, :, 1] = rows % 16, rows // 16 % 16
        w13[expert, :, expert % 2, 0] = _ONE
        w13_scale[expert, 0, :, 0] = 127 + 5  # 32
    tokens = torch.zeros(num, hidden)
    tokens[:, 0] = 1.0
    shown = [_values(codes[expert, :, expert % 2], exponents[expert, :, 0]) for expert in range(num)]
    experts = PackedExperts(pack_e2m1(w13), w13_scale, pack_e2m1(codes), exponents)
    return _shown(experts, tokens, torch.arange(num), dtype), torch.stack(shown)


def _codes_in_w3(dtype: str, wide: int, deep: int) -> tuple[MoeCase, Tensor]:
    """A call, and the numbers of its first columns, `[T, n]`.

    Exponent g scales columns 32 g to 32 g + 31 of w3; token g shows the sum of two of them, a low and a high nibble.
    Rows 0 to 15 of w3 have the 16 codes in the low one, rows 16 to 31 in the high one, except what is no float32. What
    passes the clamp comes out as 64. A NaN is in every sum, hence exponent 255 has an expert of its own.
    """
    hidden, inner, groups = wide * 256 * 32, deep * 32, torch.arange(256)
    codes = torch.arange(inner) % 16
    values = _values(codes[None], groups[:, None])  # [256, inner]
    written = torch.where(values.isinf(), 0, codes)
    w3 = torch.zeros(2, inner, hidden, dtype=torch.uint8)
    for row in range(inner):
        w3[:, row, groups * 32 + 2 + row // 16 % 2] = written[:, row].to(torch.uint8)
    w1 = torch.zeros_like(w3)
    w1[:, :, 0] = _ONE
    w13_scale = torch.full((2, 2, inner, wide * 256), 127 + 5, dtype=torch.uint8)
    w13_scale[:, 1, :, :256] = groups.to(torch.uint8)
    w13_scale[0, 1, :, 255] = 127
    w2 = torch.zeros(2, hidden, inner, dtype=torch.uint8)
    w2[:, :inner] = torch.eye(inner, dtype=torch.uint8) * _ONE
    w2_scale = torch.full((2, hidden, 1), 127, dtype=torch.uint8)
    tokens = torch.zeros(256, hidden)
    tokens[:, 0] = tokens[groups, groups * 32 + 2] = tokens[groups, groups * 32 + 3] = 1.0
    experts = PackedExperts(pack_e2m1(torch.stack([w1, w3], 1)), w13_scale, pack_e2m1(w2), w2_scale)
    return _shown(experts, tokens, groups // 255, dtype), _values(written, groups[:, None]).clamp(-64.0, 64.0)


_ONE = 2
"""The FP4 code of 1."""


def m4(subject: Subject) -> None:
    """Rows without a local expert are NaN, on the first and on the last of four ranks, at all codes and exponents."""
    for tokens in (1, 5, 300):
        for topk in (1, 4, 6):
            generator = torch.Generator().manual_seed(tokens * 10 + topk)
            ids = torch.stack([torch.randperm(8, generator=generator)[:topk] for _ in range(tokens)])
            ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
            for rank in (0, 3) if tokens < 300 else (3,):
                recipe = MoeRecipe(
                    hidden_size=1056, intermediate_size=96, num_experts=8, num_local_experts=2, expert_start=2 * rank
                )
                case = forced(subject, recipe, ids)
                sizes = case.problem.hidden_size, case.problem.intermediate_size
                experts = random_experts(2, *sizes, generator, 2 * rank)
                experts.w13[0, 0, 0, :256] = torch.arange(256, dtype=torch.uint8)
                _remote_rows_are_not_read(subject, replace(case, weights=replace(case.weights, experts=experts)), True)
                if tokens != 5:
                    continue
                experts.w13_scale[:, 1, :8, :32] = torch.arange(256, dtype=torch.uint8).view(8, 32)
                _remote_rows_are_not_read(subject, replace(case, weights=replace(case.weights, experts=experts)), False)


def _remote_rows_are_not_read(subject: Subject, case: MoeCase, compared: bool) -> None:
    """NaN in rows of other ranks gives the bits that zeros give; `compared`: with the reference too."""
    remote = ~case.local_rows()[:, None]
    zeroed = replace(case, x=case.x.masked_fill(remote, 0.0))
    poisoned = replace(case, x=case.x.masked_fill(remote, torch.nan))
    found = output(subject, poisoned) if compared else subject.run(poisoned)["y"]
    expected = subject.run(zeroed)["y"]
    equal = (found == expected) | (found.isnan() & expected.isnan())
    if subject.properties.deterministic and not bool(equal.all()):
        raise Violation(f"remote rows matter: {difference(found, expected)}")
    if not bool((found[remote[:, 0]] == 0).all()):
        raise Violation("a row without a local expert is not zero")


def far_experts(subject: Subject) -> None:
    """The same expert, with more than 2^31 bytes of others before it."""
    if subject.interpreted:
        raise Unavailable("2 GiB of weights are too many to transform where the operator is interpreted")
    hidden, inner = 2048, 2048
    last = rows_before(inner * hidden)
    recipe = MoeRecipe(
        2,
        subject.narrowest,
        "none",
        hidden,
        inner,
        num_experts=last + 1,
        num_local_experts=1,
        expert_start=last,
        seed=5,
    )
    near = forced(subject, recipe, torch.full((2, 1), last))
    expected = {"y": output(subject, near)}
    own = near.weights.experts
    others: dict[str, Any] = {
        name: _last_of(last + 1, getattr(own, name), subject.device) for name in ("w13_scale", "w2", "w2_scale")
    }
    experts = PackedExperts(w13=past_int32(own.w13, subject.device), **others)
    problem = replace(near.problem, num_local_experts=last + 1)
    far = subject.nearest([replace(near, problem=problem, weights=replace(near.weights, experts=experts))])
    found = subject.run(far)
    # Another number of experts may tile differently; a wrong expert is far outside the bound.
    subject.agree(near, found, expected, "with 2^31 bytes of experts before its own", exact=False)


def _last_of(count: int, tail: Tensor, device: torch.device) -> Tensor:
    """`count` rows of uninitialised memory, the last one given."""
    rows = torch.empty(count, *tail.shape[1:], dtype=tail.dtype, device=device)
    rows[-1] = tail[0].to(device)
    return rows


SIZES = (
    MoeRecipe(70, routing="one", hidden_size=160, intermediate_size=224),
    MoeRecipe(33, routing="any", num_experts=9, num_local_experts=7, expert_start=2, topk=3, shared=True),
    MoeRecipe(130, routing="gate", hidden_size=64, num_experts=5, num_local_experts=4, topk=2, shared=True),
    MoeRecipe(40, hidden_size=512, intermediate_size=256, num_experts=8, num_local_experts=8, topk=6, shared=True),
    MoeRecipe(17, "float32", "released", 288, 96, num_experts=3, num_local_experts=3, topk=2, shared=True),
)

LARGE = (
    tile_borders(SIZES),
    ExplicitCase("M2", "E8M0 at its edges: 0 is a subnormal, 255 is NaN; and every FP4 code and byte, bitwise", m2),
    ExplicitCase("M4", "rows of other ranks that are read; widths that are no multiple of a tile", m4),
    ExplicitCase("64-bit-offsets", "offsets in 32 bits: experts past 2^31 bytes wrap around", far_experts),
)
