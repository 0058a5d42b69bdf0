"""Epilogues: every use that a layer makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.measure.costs.epilogue import finish_cost, inject_cost
from minideepinfer.measure.kernels.batches import some_rows
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.timing import Call
from minideepinfer.operators.cost import Cost
from minideepinfer.testing.contract import Outputs
from minideepinfer.testing.recipes.epilogue import EpilogueCase, EpilogueRecipe, InjectCase, InjectRecipe
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import map_tensors

JUDGED_ROWS = 64
Case = EpilogueCase | InjectCase


def make(recipe: EpilogueRecipe | InjectRecipe, device: torch.device) -> Case:
    """Normal numbers."""
    numbers, dtype = torch.Generator(device).manual_seed(recipe.seed), getattr(torch, recipe.dtype)
    tokens, width = recipe.tokens, recipe.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, device=device)

    if isinstance(recipe, InjectRecipe):
        return InjectCase(
            problem=recipe.problem,
            streams=normal(tokens, recipe.streams, width).to(dtype),
            values=normal(tokens, recipe.streams + 1, width).to(dtype),
            weight=1 + normal(recipe.streams, width) / 10,
        )
    angles = 100 * normal(tokens, recipe.pairs) if recipe.pairs else None
    return EpilogueCase(
        problem=recipe.problem,
        x=normal(tokens, *([recipe.heads] if recipe.heads else []), width).to(dtype),
        norm_weight=1 + normal(width) / 10 if recipe.norm else None,
        cos=None if angles is None else angles.cos(),
        sin=None if angles is None else angles.sin(),
        quantization=recipe.quantization,
        in_place=recipe.in_place,
    )


def bind(subject: Subject, operator: Any, case: Case) -> Call:
    """The recipe's call; in place, it goes on from what it left."""
    if isinstance(case, InjectCase):
        return lambda: operator.inject(case.streams, case.values, case.weight)
    x = case.x.clone() if case.in_place else case.x
    return lambda: operator.run(x, case.norm_weight, case.cos, case.sin, case.quantization, case.in_place)


def outputs(case: Case, result: Tensor) -> Outputs:
    """A copy: the next call may overwrite what this one returned."""
    return {"streams" if isinstance(case, InjectCase) else "y": result.clone()}


def cost(case: Case) -> Cost:
    """Nothing to count."""
    if isinstance(case, InjectCase):
        return inject_cost(case.problem, *case.streams.shape)
    return finish_cost(
        case.problem,
        len(case.x),
        case.x.shape[-1],
        heads=case.x.shape[1] if case.x.dim() == 3 else 1,
        norm=case.norm_weight is not None,
        pairs=0 if case.cos is None else case.cos.shape[1],
        rounded=case.quantization != "none",
        in_place=case.in_place,
    )


def sample(case: Case) -> tuple[Tensor, Case]:
    """A few rows."""
    given = case.streams if isinstance(case, InjectCase) else case.x
    rows = some_rows(len(given), JUDGED_ROWS, given.device)
    few, _ = case.take(rows.tolist())
    return rows, map_tensors(few, lambda tensor: tensor.cpu())


RUN = Kernel(bind, outputs, cost)
_ROW = EpilogueRecipe(dtype="bfloat16", in_place=True)
USES: dict[str, EpilogueRecipe | InjectRecipe] = {
    "qr: norm": replace(_ROW, width=1280, norm=True),
    "q: rotate": replace(_ROW, heads=64, width=512, pairs=32),
    "window: norm, rotate, fp8": replace(_ROW, width=512, norm=True, pairs=32, quantization="fp8"),
    "index query: rotate, mxfp4": replace(_ROW, heads=32, width=128, pairs=32, quantization="mxfp4"),
    "index key: norm, rotate, mxfp4": replace(_ROW, width=128, norm=True, pairs=32, quantization="mxfp4"),
    "main entry: rotate, nvfp4": replace(_ROW, width=512, pairs=32, quantization="nvfp4"),
    "hidden: fp8": replace(_ROW, width=5120, quantization="fp8", in_place=False),
    "output: fp8": replace(_ROW, width=8192, quantization="fp8"),
    "Engram: gates": InjectRecipe(dtype="bfloat16", streams=4, width=5120),
}
"""At the released sizes; what a decode step calls in each layer comes first."""
DECODED = tuple(USES)[:3]
TINY = {
    "norm, rotate, fp8": EpilogueRecipe(tokens=16, heads=2, width=64, norm=True, pairs=8, quantization="fp8"),
    "gates": InjectRecipe(tokens=16, streams=4, width=128),
}

FAMILY = KernelFamily(
    family="epilogue",
    problems={
        "v41-rank": {name: (RUN, replace(recipe, tokens=4096)) for name, recipe in USES.items()},
        "decode": {
            f"{name}, T={tokens}": (RUN, replace(USES[name], tokens=tokens, decode=True))
            for tokens in (1, 64)
            for name in DECODED
        },
        "tiny": {name: (RUN, recipe) for name, recipe in TINY.items()},
    },
    make=make,
    sample=sample,
)
