"""Epilogue: what follows the dense products of attention and indexer, and Engram's gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.measure.costs.epilogue import epilogue_cost, inject_cost
from minideepinfer.measure.kernels.batches import some_rows
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.timing import Call
from minideepinfer.operators.cost import Cost
from minideepinfer.testing.contract import Outputs
from minideepinfer.testing.recipes.epilogue import EpilogueCase, EpilogueRecipe, InjectCase, InjectRecipe
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import map_tensors

JUDGED_ROWS = 16


def make(recipe: EpilogueRecipe | InjectRecipe, device: torch.device) -> EpilogueCase | InjectCase:
    """Normal numbers."""
    numbers, dtype = torch.Generator(device).manual_seed(recipe.seed), getattr(torch, recipe.dtype)
    tokens, width = recipe.tokens, recipe.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, device=device)

    if isinstance(recipe, InjectRecipe):
        streams, values = normal(tokens, recipe.streams, width), normal(tokens, recipe.streams + 1, width)
        weight = 1 + normal(recipe.streams, width) / 10
        return InjectCase(recipe.problem, streams.to(dtype), values.to(dtype), weight)
    shape = (tokens, recipe.heads, width) if recipe.heads else (tokens, width)
    angles = normal(tokens, recipe.pairs) * 3
    return EpilogueCase(
        problem=recipe.problem,
        x=normal(*shape).to(dtype),
        norm_weight=1 + normal(width) / 10 if recipe.norm else None,
        cos=angles.cos() if recipe.pairs else None,
        sin=angles.sin() if recipe.pairs else None,
        quantization=recipe.quantization,
        in_place=recipe.in_place,
    )


def bind(subject: Subject, operator: Any, case: EpilogueCase | InjectCase) -> Call:
    """The recipe's call; what it may overwrite is a copy, which each call finds as the one before left it."""
    if isinstance(case, InjectCase):
        return lambda: operator.inject(case.streams, case.values, case.weight)
    x = case.x.clone() if case.in_place else case.x
    return lambda: operator.run(x, case.norm_weight, case.cos, case.sin, case.quantization, case.in_place)


def outputs(case: EpilogueCase | InjectCase, result: Tensor) -> Outputs:
    """Rows, or streams."""
    return {"streams" if isinstance(case, InjectCase) else "y": result}


def cost(case: EpilogueCase | InjectCase) -> Cost:
    """Nothing to count."""
    if isinstance(case, InjectCase):
        return inject_cost(case.problem.dtype, *case.streams.shape)
    return epilogue_cost(
        case.problem.dtype,
        len(case.x),
        case.x.shape[1] if case.x.dim() == 3 else 1,
        case.x.shape[-1],
        pairs=0 if case.cos is None else case.cos.shape[1],
        norm=case.norm_weight is not None,
        rounds=case.quantization != "none",
        in_place=case.in_place,
    )


def sample(case: EpilogueCase | InjectCase) -> tuple[Tensor, EpilogueCase | InjectCase]:
    """A few tokens."""
    few: EpilogueCase | InjectCase
    if isinstance(case, InjectCase):
        rows = some_rows(len(case.streams), JUDGED_ROWS, case.streams.device)
        few = replace(case, streams=case.streams[rows], values=case.values[rows])
    else:
        rows = some_rows(len(case.x), JUDGED_ROWS, case.x.device)
        cos, sin = (None if angles is None else angles[rows] for angles in (case.cos, case.sin))
        few = replace(case, x=case.x[rows], cos=cos, sin=sin)
    return rows, map_tensors(few, lambda tensor: tensor.cpu())


RUN = Kernel(bind, outputs, cost)
RELEASED = EpilogueRecipe(dtype="bfloat16", in_place=True)
CALLS = {
    "queries, rotation": replace(RELEASED, heads=64, width=512, pairs=32),
    "low-rank queries, norm": replace(RELEASED, width=1280, norm=True),
    "window entries, norm, rotation, fp8": replace(RELEASED, width=512, norm=True, pairs=32, quantization="fp8"),
    "index queries, rotation, mxfp4": replace(RELEASED, heads=32, width=128, pairs=32, quantization="mxfp4"),
    "Engram's gates": InjectRecipe(dtype="bfloat16", streams=4, width=5120),
}
DECODED = ("queries, rotation", "window entries, norm, rotation, fp8")
TINY = EpilogueRecipe(tokens=16, width=64, in_place=True)

FAMILY = KernelFamily(
    family="epilogue",
    problems={
        "v41-rank": {name: (RUN, replace(recipe, tokens=4096)) for name, recipe in CALLS.items()},
        "decode": {
            f"{name}, T={tokens}": (RUN, replace(CALLS[name], tokens=tokens, decode=True))
            for name in DECODED
            for tokens in (1, 8, 64)
        },
        "tiny": {
            "queries, rotation": (RUN, replace(TINY, heads=8, pairs=8)),
            "low-rank queries, norm": (RUN, replace(TINY, norm=True)),
            "window entries, norm, rotation, fp8": (RUN, replace(TINY, norm=True, pairs=8, quantization="fp8")),
            "Engram's gates": (RUN, InjectRecipe(tokens=16, streams=4, width=128)),
        },
    },
    make=make,
    sample=sample,
)
