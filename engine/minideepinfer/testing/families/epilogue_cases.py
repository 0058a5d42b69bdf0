"""Epilogues: edge cases tried first, and cases P1 to P4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from minideepinfer.operators import Quantization
from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.epilogue_bounds import FORMATS
from minideepinfer.testing.families.whole_model import WHOLE_MODEL
from minideepinfer.testing.recipes.epilogue import EpilogueCase, EpilogueRecipe, InjectCase, InjectRecipe
from minideepinfer.testing.subject import Subject

R = TypeVar("R", EpilogueRecipe, InjectRecipe)
_ALL = EpilogueRecipe(tokens=3, heads=2, width=64, norm=True, pairs=4, quantization="fp8")

EDGES = (
    _ALL,
    replace(_ALL, quantization="nvfp4", in_place=True),
    replace(_ALL, norm=False, quantization="mxfp4", numbers="uneven"),
    replace(_ALL, norm=False, quantization="none", in_place=True),
    replace(_ALL, quantization="none"),
    replace(_ALL, tokens=0),
    EpilogueRecipe(tokens=2, heads=3, width=7, norm=True),
    EpilogueRecipe(tokens=2, width=6, pairs=3),
    EpilogueRecipe(tokens=2, width=1, norm=True, amplitude=1e-10, in_place=True),
    EpilogueRecipe(tokens=2, width=96, quantization="fp8", numbers="grid"),
    EpilogueRecipe(tokens=2, width=96, quantization="fp8", numbers="uneven"),
    EpilogueRecipe(tokens=2, width=96, quantization="mxfp4", numbers="grid", in_place=True),
    EpilogueRecipe(tokens=2, width=96, quantization="nvfp4", numbers="grid"),
    EpilogueRecipe(tokens=3),
    EpilogueRecipe(tokens=3, in_place=True),
    InjectRecipe(tokens=3, streams=4, width=40),
    InjectRecipe(tokens=3, streams=4, width=40, alike=-1.0),
    InjectRecipe(tokens=0, streams=2),
    InjectRecipe(tokens=2, streams=3, width=7, amplitude=1e-10, alike=1.0),
)


def _served(subject: Subject, recipe: EpilogueRecipe) -> EpilogueCase:
    """The call, at the nearest width and dtype that the operator serves."""
    return subject.nearest(one.build() for one in _wider(subject, recipe))


def _injection(subject: Subject, recipe: InjectRecipe) -> InjectCase:
    return subject.nearest(one.build() for one in _wider(subject, recipe))


def _wider(subject: Subject, recipe: R) -> Iterator[R]:
    for dtype in subject.dtypes:
        for factor in (1, 4, 16, 64):
            yield replace(recipe, dtype=dtype, width=recipe.width * factor)


def _hold(subject: Subject, case: EpilogueCase | InjectCase) -> Tensor:
    """The operator's result, compared with the reference."""
    found = subject.run(case)
    subject.family.compare(subject, case, found, subject.reference(case), 1.0)
    return next(iter(found.values()))


def p1(subject: Subject) -> None:
    """Rows of zeros give zeros, whatever is asked for, also beside rows that are normalised by their eps."""
    everything: tuple[Quantization, ...] = ("none", *FORMATS)
    for quantization in everything:
        for recipe in (_ALL, replace(_ALL, heads=0, pairs=0), replace(_ALL, norm=False)):
            case = _served(subject, replace(recipe, quantization=quantization, amplitude=1e-12))
            case.x[1] = 0.0
            if bool(_hold(subject, case)[1].count_nonzero()):
                raise Violation(f"{quantization}: rows of zeros must give zeros")


def p2(subject: Subject) -> None:
    """Numbers at the borders of codes and scales, one step of the compute dtype to either side, and at the floors."""
    case = _served(subject, EpilogueRecipe(tokens=1, width=96))
    for quantization in FORMATS:
        x = _borders(quantization, case.x.dtype, case.x.shape[-1])
        _hold(subject, replace(case, x=x, quantization=quantization))


def _borders(quantization: Quantization, dtype: torch.dtype, width: int) -> Tensor:
    """`[T, width]`: the largest of a group is at a border of scales, the others at borders of codes."""
    form = FORMATS[quantization]
    codes = torch.tensor([0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 2.0**-10, 1.5 * 2.0**-9, 0.0])
    if quantization == "fp8":
        codes = torch.cat([codes, torch.tensor([17.0, 19.0, 232.0, 248.0, 432.0, 440.0, 447.0])])
    largest = torch.tensor([6.0, 448.0, 9.0, 6.375, 6.75, 1e-4, 6 * 2.0**-9, 2700.0, 3.0 * 2.0**-9, 5.0 * 2.0**-7])
    tops = torch.cat([largest * 2.0**k for k in (0, 1, -3, -14, -117, 20)])
    tops = torch.cat([_beside(tops.to(dtype), step) for step in (-1, 0, 1)]).float()
    scales = form.scale(form.scale_number(tops.double())).float()
    inner = codes.repeat(form.group)[: form.group - 1] * torch.tensor([1.0, -1.0]).repeat(form.group)[: form.group - 1]
    groups = (inner * scales[:, None]).to(dtype)
    groups = torch.cat([_beside(groups, step) for step in (-1, 0, 1)])
    groups = groups.clamp(-tops.to(dtype).repeat(3)[:, None], tops.to(dtype).repeat(3)[:, None])
    whole = torch.cat([tops.to(dtype).repeat(3)[:, None], groups], dim=1).flatten()
    return whole[: len(whole) // width * width].view(-1, width)


def _beside(x: Tensor, step: int) -> Tensor:
    """The next number of the dtype towards zero (-1) or away from it (1)."""
    bits = x.view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)
    return torch.where(x == 0, bits, bits + step).view(x.dtype)


def p3(subject: Subject) -> None:
    """One row and many, narrow and wide, few heads and many: partial tiles of rows and channels."""
    for tokens, heads, width in ((1, 0, 5120), (67, 0, 96), (9, 5, 32), (3, 64, 160), (2, 0, 1056)):
        recipe = replace(_ALL, tokens=tokens, heads=heads, width=width)
        for call in (
            replace(recipe, pairs=0, quantization="none"),
            replace(recipe, pairs=8),
            replace(recipe, norm=False, pairs=16, quantization="nvfp4", in_place=True),
            replace(recipe, norm=False, quantization="none", in_place=True),
        ):
            _hold(subject, _served(subject, call))


def p4(subject: Subject) -> None:
    """Gates of streams of zeros, of keys of zeros, and of products that are nearly zero; wide streams, many tokens."""
    for tokens, streams, width in ((67, 1, 40), (2, 4, 5120), (3, 2, 1030)):
        case = _injection(subject, InjectRecipe(tokens=tokens, streams=streams, width=width, alike=0.5))
        case.streams[0] = 0.0
        case.values[1, 0] = 0.0
        found = _hold(subject, case)
        half = case.values[0, -1].double() * torch.tensor(1e-3, dtype=torch.float64).sigmoid()
        if not torch.allclose(found[0, 0].double(), half, rtol=2.0**-7, atol=0.0):
            raise Violation(f"a stream of zeros takes {found[0, 0, :2].tolist()}, not half of the value")


CASES = (
    ExplicitCase("P1", "0 / 0 in a norm or in a scale; an eps of 1e-6 by habit", p1),
    ExplicitCase("P2", "ties that do not go to the even code; a scale that is truncated, or floored elsewhere", p2),
    ExplicitCase("P3", "rows or channels at the edge of a tile left out, or done twice", p3),
    ExplicitCase("P4", "0 / 0 in a gate, or the floor of its root left out", p4),
    *WHOLE_MODEL,
)
