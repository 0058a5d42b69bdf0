"""Communication that one rank has: rows of a table that it holds. What passes between ranks needs several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.measure.costs.comm import fetch_cost
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.timing import Call
from minideepinfer.operators.cost import Cost
from minideepinfer.testing.contract import Outputs
from minideepinfer.testing.recipes.comm import CommCase, CommRecipe
from minideepinfer.testing.subject import Subject


def make(recipe: CommRecipe, device: torch.device) -> CommCase:
    """Random bytes, and random rows of them."""
    numbers = torch.Generator(device).manual_seed(recipe.seed)

    def integers(below: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(0, below, shape, generator=numbers, device=device, dtype=dtype)

    ids = integers(recipe.num_experts, recipe.tokens, recipe.topk, dtype=torch.int32)
    return CommCase(
        problem=recipe.problem,
        x=torch.randn(recipe.tokens, recipe.hidden_size, generator=numbers, device=device).to(
            getattr(torch, recipe.dtype)
        ),
        topk_ids=ids,
        topk_weights=torch.rand(ids.shape, generator=numbers, device=device),
        table=integers(256, recipe.table_rows, recipe.row_bytes, dtype=torch.uint8),
        row_ids=integers(recipe.table_rows, recipe.rows, dtype=torch.int64),
    )


def bind(subject: Subject, operator: Any, case: CommCase) -> Call:
    """The rows."""
    return lambda: operator.fetch_rows([case.table], case.row_ids, len(case.table)).wait()[0]


def outputs(case: CommCase, result: Tensor) -> Outputs:
    """The rows."""
    return {"rows": result}


def cost(case: CommCase) -> Cost:
    """Counts the distinct rows."""
    return fetch_cost(len(case.row_ids), len(case.row_ids.unique()), case.table.shape[1])


def sample(case: CommCase) -> tuple[None, CommCase]:
    """All rows: they are compared bit by bit."""
    return None, case


RUN = Kernel(bind, outputs, cost)
ENGRAM = CommRecipe(dtype="bfloat16", hidden_size=5120, num_experts=384, topk=6, row_bytes=264, table_rows=1 << 22)
ROWS_OF_TOKEN = 24
"""Engram rows that a token looks up in one layer."""

FAMILY = KernelFamily(
    family="comm",
    problems={
        "v41-rank": {"Engram rows, T=4096": (RUN, replace(ENGRAM, rows=ROWS_OF_TOKEN * 4096))},
        "decode": {f"Engram rows, T={t}": (RUN, replace(ENGRAM, rows=ROWS_OF_TOKEN * t)) for t in (1, 8, 64)},
        "tiny": {"Engram rows": (RUN, CommRecipe(rows=64, row_bytes=40, table_rows=1092))},
    },
    make=make,
    sample=sample,
)
