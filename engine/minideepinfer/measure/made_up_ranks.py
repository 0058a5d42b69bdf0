"""The other ranks of an expert-parallel world, made up on one GPU: their tokens are random rows, nothing travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import Arrived, Dispatched

Routing = tuple[Tensor, Tensor]


class MadeUpRanks:
    """A `CommOperator` of rank 0 whose peers send random rows, so that this rank's experts do their real work.

    What a rank would receive lies in one buffer: its own rows first, then those of the others. Partial sums of the
    other ranks are not made up, they are left out of `combine`.
    """

    rank = 0
    sent_bytes = 0

    def __init__(self, world_size: int, strangers: Tensor) -> None:
        """Keep the strangers' rows.

        Args:
            world_size: ranks, this one included.
            strangers: `[(world_size - 1) * T, H]`, the others' rows for up to T rows of this rank.
        """
        self.world_size = world_size
        self.strangers = strangers
        self.dispatched_ids: list[Tensor] = []
        """Experts of all rows of each dispatch since the last `reset`."""
        self._routing: list[Routing] = []

    def set_routing(self, routing: Sequence[Routing]) -> None:
        """Say how the strangers' rows are routed, for each MoE layer in the order in which layers dispatch."""
        self._routing = list(routing)
        self.reset()

    def reset(self) -> None:
        """Start a step: the next dispatch is that of the first layer."""
        self.dispatched_ids.clear()

    def prepare(self, counts: Sequence[int]) -> MadeUpRanks:
        """The strangers have as many rows as this rank."""
        return self

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """As many rows on every rank as here."""
        return x.repeat(self.world_size, *[1] * (x.dim() - 1))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Not part of this benchmark."""
        raise NotImplementedError("one rank, no network: nothing is reduced")

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Arrived[Dispatched]:
        """This rank's rows, followed by the strangers'."""
        others = (self.world_size - 1) * len(x)
        ids, weights = self._routing[len(self.dispatched_ids)]
        self.dispatched_ids.append(torch.cat([topk_ids, ids[:others]]))
        dispatched = Dispatched(
            torch.cat([x, self.strangers[:others]]),
            self.dispatched_ids[-1],
            torch.cat([topk_weights, weights[:others]]),
            handle=len(x),
        )
        return Arrived(dispatched)

    def combine(self, partial: Tensor, handle: Any) -> Arrived[Tensor]:
        """The partial sums of this rank's own rows."""
        return Arrived(partial[:handle])

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Arrived[tuple[Tensor, ...]]:
        """Rows of tables that hold a part of the real ones: row numbers are taken modulo their length."""
        return Arrived(tuple(table[(row_ids % len(table)).to(table.device)].to(row_ids.device) for table in tables))
