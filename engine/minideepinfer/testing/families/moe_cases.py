"""MoE: edge cases tried first, and cases M1, M2, M4 and the one-rank part of C1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.operators import PackedExperts
from minideepinfer.quantization import decode_e2m1
from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe, random_experts
from minideepinfer.testing.subject import Subject, difference
from minideepinfer.testing.tensors import same_bits

WIDTHS = ((1, 1), (2, 1), (4, 2), (8, 4))
"""Factors on hidden and inner size that a case may run at, the wanted ones first."""

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
    replace(_FOUR, activation_quantization="released", shared=True),
    replace(_FOUR, activation_quantization="released", routing="gate"),
    replace(_WIDE, shared=True),
    replace(_WIDE, activation_quantization="released"),
    replace(_WIDE, activation_quantization="released", routing="one"),
)


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


def _forced(subject: Subject, recipe: MoeRecipe, ids: Tensor) -> MoeCase:
    """A case with these ids, at the nearest widths and dtype that the operator serves."""

    def wider() -> Iterator[MoeCase]:
        for dtype in subject.dtypes:
            for hidden, inner in WIDTHS:
                at = replace(
                    recipe,
                    dtype=dtype,
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


def _y(subject: Subject, case: MoeCase) -> Tensor:
    """The operator's output, compared with the reference."""
    found = subject.run(case)
    subject.family.compare(subject, case, found, subject.reference(case), 1.0)
    return found["y"]


def m1(subject: Subject) -> None:
    """Experts without tokens hold NaN; so does memory of the output's size."""
    ids = torch.tensor([[1], [3], [1], [1], [3], [1], [3], [1]])
    case = _forced(subject, MoeRecipe(hidden_size=64, intermediate_size=96, num_experts=6, num_local_experts=6), ids)
    for unused in (0, 2, 4, 5):
        case.weights.experts.w13_scale[unused] = 255
        case.weights.experts.w2_scale[unused] = 255
    outputs = []
    for _ in range(2):
        block = torch.full(case.x.shape, torch.nan, device=subject.device)
        del block
        outputs.append(_y(subject, case))
    if subject.properties.deterministic and not same_bits(*outputs):
        raise Violation("two runs have other bits")


def m2(subject: Subject) -> None:
    """All 16 codes under all 256 exponents, in w2: what comes out shows the decoded numbers."""
    recipe = MoeRecipe(hidden_size=4096, intermediate_size=96, num_experts=1, num_local_experts=1)
    case = _forced(subject, recipe, torch.zeros(1, 1, dtype=torch.int64))
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
    # What goes into w2 is 1 up to the last bit of silu; subnormal results lose bits of their own.
    wrong |= (y.double() - expected.double()).abs() > 2.0**-7 * expected.double().abs() + 2.0**-128
    if subject.properties.deterministic and y.dtype is torch.float32:
        reference = subject.reference(case)["y"][0, :4096]
        normal = expected.abs() >= 2.0**-126
        wrong |= normal & ((y - reference).abs() > 2.0**-22 * reference.abs())
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise Violation(
            f"code {int(codes[at])} with exponent {int(exponents[at])} is {float(y[at])}, not {float(expected[at])}"
        )


def m4(subject: Subject) -> None:
    """Rows without a local expert are NaN, on the first and on the last of four ranks."""
    for tokens, topk in ((1, 1), (1, 6), (5, 4), (300, 6)):
        generator = torch.Generator().manual_seed(tokens * 10 + topk)
        ids = torch.stack([torch.randperm(8, generator=generator)[:topk] for _ in range(tokens)])
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        for rank in (0, 3):
            recipe = MoeRecipe(
                hidden_size=1056, intermediate_size=96, num_experts=8, num_local_experts=2, expert_start=2 * rank
            )
            case = _forced(subject, recipe, ids)
            experts = random_experts(2, case.problem.hidden_size, case.problem.intermediate_size, generator, 2 * rank)
            experts.w13[0, 0, 0, :256] = torch.arange(256, dtype=torch.uint8)
            case = replace(case, weights=replace(case.weights, experts=experts))
            remote = ~case.local_rows()[:, None]
            zeroed = replace(case, x=case.x.masked_fill(remote, 0.0))
            poisoned = replace(case, x=case.x.masked_fill(remote, torch.nan))
            found, expected = _y(subject, poisoned), subject.run(zeroed)["y"]
            if subject.properties.deterministic and not same_bits(found, expected):
                raise Violation(f"remote rows matter: {difference(found, expected)}")
            if not bool((found[remote[:, 0]] == 0).all()):
                raise Violation("a row without a local expert is not zero")


def c1(subject: Subject) -> None:
    """No token, tokens anywhere, and every token on the last experts."""
    recipe = MoeRecipe(num_experts=8, num_local_experts=8)
    for ids in ([[0, 7], [3, 3], [5, -1], [6, 2]], [[6, 7]] * 4):
        case = _forced(subject, recipe, torch.tensor(ids))
        _y(subject, case)
        empty, _ = case.take([])
        if _y(subject, empty).shape != (0, case.problem.hidden_size):
            raise Violation("no tokens must give [0, hidden]")


CASES = (
    ExplicitCase("M1", "experts without tokens, whose rows stay unwritten or whose weights are read", m1),
    ExplicitCase("M2", "E8M0 at its edges: 0 is a subnormal, 255 is NaN; and every FP4 code", m2),
    ExplicitCase("M4", "rows of other ranks that are read; widths that are no multiple of a tile", m4),
    ExplicitCase("C1", "a rank without tokens, and all tokens on the last experts (one rank)", c1),
)
