"""Calls of every method of a comm operator, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import CommProblem
from minideepinfer.testing.recipes.batch import facts


@dataclass(frozen=True)
class CommCase:
    """Tokens with their experts, and a table with the rows wanted of it."""

    problem: CommProblem
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    table: Tensor
    row_ids: Tensor

    @property
    def units(self) -> int:
        """Tokens."""
        return len(self.x)

    def run(self, operator: Any) -> dict[str, Tensor]:
        """Call every method; `combined` is what comes home from experts that return what they are given."""
        counts = [len(self.x)]
        exchange = operator.prepare(counts)
        dispatched = exchange.dispatch(self.x, self.topk_ids, self.topk_weights).wait()
        partial = identity_experts(dispatched.x, dispatched.topk_ids, dispatched.topk_weights)
        ids = dispatched.topk_ids
        some = (ids >= 0).any(1)  # what has no expert need not be there
        return {
            "dispatched x": dispatched.x[some],
            "dispatched topk_ids": ids[some],
            "dispatched topk_weights": dispatched.topk_weights.masked_fill(ids < 0, 0.0)[some],
            "combined": exchange.combine(partial, dispatched.handle).wait(),
            "gathered": operator.all_gather(self.x, counts),
            "scattered": operator.reduce_scatter(self.x.float(), counts),
            "rows": operator.fetch_rows([self.table], self.row_ids, len(self.table)).wait()[0],
        }

    def take(self, order: Sequence[int]) -> tuple[CommCase, Tensor]:
        """Some tokens in another order, and which old row each new row is."""
        rows = torch.tensor(list(order), dtype=torch.int64)
        return replace(self, x=self.x[rows], topk_ids=self.topk_ids[rows], topk_weights=self.topk_weights[rows]), rows


def identity_experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts that return their input: float32 `[T, H]`, x times the sum of its weights; an id of -1 is no expert."""
    # float64, so that the sum of a few float32 weights is the same number on every device.
    total = weights.double().masked_fill(ids < 0, 0.0).sum(1, keepdim=True).float()
    return (x.float() * total).masked_fill((ids < 0).all(1, keepdim=True), 0.0)


@dataclass(frozen=True)
class CommRecipe:
    """Makes the calls.

    Attributes:
        tokens: rows of x.
        rows: rows fetched from a table; ids may repeat.
        row_bytes: width of the table.
        table_rows: its height.
        seed: of all numbers.
    """

    tokens: int = 1
    dtype: str = "float32"
    hidden_size: int = 4
    num_experts: int = 2
    topk: int = 1
    rows: int = 1
    row_bytes: int = 5
    table_rows: int = 7
    seed: int = 0

    @property
    def problem(self) -> CommProblem:
        """What the operator is told."""
        shared_facts = facts(getattr(torch, self.dtype))
        return CommProblem(**shared_facts, hidden_size=self.hidden_size, num_experts=self.num_experts, world_size=1)

    def build(self) -> CommCase:
        """The calls."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        ids = torch.randint(-1, self.num_experts, (self.tokens, self.topk), generator=generator).int()
        return CommCase(
            self.problem,
            torch.randn(self.tokens, self.hidden_size, generator=generator).to(dtype),
            ids,
            torch.rand(ids.shape, generator=generator),
            torch.randint(0, 256, (self.table_rows, self.row_bytes), generator=generator, dtype=torch.uint8),
            torch.randint(0, self.table_rows, (self.rows,), generator=generator),
        )
