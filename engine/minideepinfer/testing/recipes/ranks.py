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
    table: Tensor
    row_ids: Tensor

    def run(self, operator: Any) -> dict[str, Tensor]:
        """Call every method; experts return what they are given."""
        exchange = operator.prepare(self.counts)
        fetch = operator.fetch_rows([self.table], self.row_ids, 3)
        dispatched = exchange.dispatch(self.x, self.topk_ids, self.topk_weights).wait()
        share = self.problem.num_experts // len(self.counts)
        ids = dispatched.topk_ids
        mine = ids.masked_fill((ids < 0) | (ids // share != self.rank), -1)
        partial = identity_experts(dispatched.x, mine, dispatched.topk_weights)
        return {
            "combined": exchange.combine(partial, dispatched.handle).wait(),
            "gathered": operator.all_gather(self.x, self.counts),
            "scattered": operator.reduce_scatter(self.summands, self.counts),
            "rows": fetch.wait()[0],
        }


@dataclass(frozen=True)
class RanksRecipe:
    """Makes the parts of all ranks.

    Attributes:
        counts: tokens of each rank.
        routing: `any` expert; or all on the `last` rank's.
        seed: of all numbers.
    """

    counts: tuple[int, ...]
    dtype: str = "float32"
    hidden_size: int = 32
    topk: int = 2
    routing: str = "any"
    seed: int = 0

    def build(self) -> list[RankCase]:
        """One part for each rank; 2 experts on each, and shards of 3 rows."""
        generator = torch.Generator().manual_seed(self.seed)
        size, dtype = len(self.counts), getattr(torch, self.dtype)
        problem = CommProblem(**facts(dtype), hidden_size=self.hidden_size, num_experts=2 * size, world_size=size)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        cases = []
        for rank, count in enumerate(self.counts):
            first = 2 * size - 2 if self.routing == "last" else -1
            cases.append(
                RankCase(
                    problem,
                    rank,
                    self.counts,
                    x=integers(-4, 5, count, self.hidden_size).to(dtype),
                    topk_ids=integers(first, 2 * size, count, self.topk).int(),
                    topk_weights=integers(0, 5, count, self.topk) / 4,
                    summands=integers(-4, 5, sum(self.counts), 5).float(),
                    table=integers(0, 256, 3, 7).to(torch.uint8),
                    row_ids=integers(0, 3 * size, count),
                )
            )
        return cases


def expected(cases: Sequence[RankCase]) -> list[dict[str, Tensor]]:
    """What each rank must get."""
    gathered = torch.cat([case.x for case in cases])
    total = torch.stack([case.summands for case in cases]).sum(0).split(list(cases[0].counts))
    table = torch.cat([case.table for case in cases])
    return [
        {
            "combined": identity_experts(case.x, case.topk_ids, case.topk_weights),
            "gathered": gathered,
            "scattered": total[case.rank],
            "rows": table[case.row_ids],
        }
        for case in cases
    ]
