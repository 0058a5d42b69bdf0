"""What several ranks do with their comm operators, in numbers whose sums are exact; and what must come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import CommProblem
from minideepinfer.testing.recipes.batch import facts
from minideepinfer.testing.recipes.comm import identity_experts

SHARD = 3
"""Rows of each rank's part of a table; the last rank has fewer."""


@dataclass(frozen=True)
class RankCase:
    """The part of one rank: tokens of its own, summands for everybody, a shard of a table, rows wanted of the whole."""

    problem: CommProblem
    rank: int
    counts: tuple[int, ...]
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    summands: Tensor
    tables: tuple[Tensor, Tensor]
    row_ids: Tensor

    def run(self, operator: Any) -> dict[str, Tensor]:
        """Call every method, with rows on their way meanwhile; experts return what they are given."""
        exchange = operator.prepare(self.counts)
        fetch = operator.fetch_rows(self.tables, self.row_ids, SHARD)
        dispatched = exchange.dispatch(self.x, self.topk_ids, self.topk_weights).wait()
        ids, weights = self.local(dispatched.topk_ids, dispatched.topk_weights)
        some = (ids >= 0).any(1)
        partial = identity_experts(dispatched.x, ids, weights)
        combined = exchange.combine(partial, dispatched.handle).wait()
        gathered = operator.all_gather(self.x, self.counts)
        scattered = operator.reduce_scatter(self.summands, self.counts)
        rows = fetch.wait()
        return {
            "arrived x": dispatched.x[some],
            "arrived topk_ids": ids[some],
            "arrived topk_weights": weights[some],
            "combined": combined,
            "gathered": gathered,
            "scattered": scattered,
            "rows": rows[0],
            "rows of the second table": rows[1],
        }

    def local(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights, with -1 and 0 for what is no expert of this rank."""
        share = self.problem.num_experts // len(self.counts)
        other = (ids < 0) | (ids // share != self.rank)
        return ids.masked_fill(other, -1), weights.masked_fill(other, 0.0)


@dataclass(frozen=True)
class RanksRecipe:
    """Makes the parts of all ranks.

    Attributes:
        counts: tokens of each rank.
        routing: `any` expert; or only those of the `first` or the `last` rank; or `none`.
        seed: of all numbers.
    """

    counts: tuple[int, ...]
    dtype: str = "float32"
    hidden_size: int = 32
    topk: int = 2
    routing: str = "any"
    seed: int = 0

    def build(self) -> list[RankCase]:
        """One part for each rank; 2 experts on each, and shards of `SHARD` rows."""
        generator = torch.Generator().manual_seed(self.seed)
        size, dtype = len(self.counts), getattr(torch, self.dtype)
        problem = CommProblem(**facts(dtype), hidden_size=self.hidden_size, num_experts=2 * size, world_size=size)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        ids = {"any": (-1, 2 * size), "first": (0, 2), "last": (2 * size - 2, 2 * size), "none": (-1, 0)}[self.routing]
        cases = []
        for rank, count in enumerate(self.counts):
            rows = SHARD - (rank == size - 1)
            cases.append(
                RankCase(
                    problem,
                    rank,
                    self.counts,
                    x=integers(-4, 5, count, self.hidden_size).to(dtype),
                    topk_ids=integers(*ids, count, self.topk).int(),
                    topk_weights=integers(0, 64, count, self.topk) / 64,
                    summands=integers(-4, 5, sum(self.counts), 5).float(),
                    tables=(integers(0, 256, rows, 7).to(torch.uint8), integers(0, 256, rows, 2).to(torch.uint8)),
                    row_ids=integers(0, SHARD * size - 1, count * 2),
                )
            )
        return cases


def expected(cases: Sequence[RankCase]) -> list[dict[str, Tensor]]:
    """What each rank must get."""
    gathered = torch.cat([case.x for case in cases])
    total = torch.stack([case.summands for case in cases]).sum(0).split(list(cases[0].counts))
    tables = [torch.cat([case.tables[i] for case in cases]) for i in (0, 1)]
    return [
        {
            **_arriving(cases, case),
            "combined": identity_experts(case.x, case.topk_ids, case.topk_weights),
            "gathered": gathered,
            "scattered": total[case.rank],
            "rows": tables[0][case.row_ids],
            "rows of the second table": tables[1][case.row_ids],
        }
        for case in cases
    ]


def _arriving(cases: Sequence[RankCase], here: RankCase) -> dict[str, Tensor]:
    """What has an expert on a rank, in rank order."""
    ids = torch.cat([case.topk_ids for case in cases])
    ids, weights = here.local(ids, torch.cat([case.topk_weights for case in cases]))
    some = (ids >= 0).any(1)
    x = torch.cat([case.x for case in cases])
    return {"arrived x": x[some], "arrived topk_ids": ids[some], "arrived topk_weights": weights[some]}
