"""The other ranks of an expert-parallel world, made up on one GPU: their tokens are random rows, nothing travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minideepinfer.model.block import Block
from minideepinfer.operators import Arrived, Dispatched, StageClock

MADE_UP = "made-up ranks"
"""The stage in which this rank's rows are put in front of the strangers'; it stands where a dispatch would."""


class MadeUpRanks:
    """A `CommOperator` of rank 0 whose peers send random rows, so that this rank's experts do their real work.

    What a rank would receive lies in one buffer: its own rows, followed by those of the others. Partial sums of the
    other ranks are not made up, they are left out of `combine`.
    """

    rank = 0
    sent_bytes = 0

    def __init__(self, world_size: int, most_rows: int, like: Tensor, clock: StageClock) -> None:
        """Make room.

        Args:
            world_size: ranks, this one included.
            most_rows: rows of a rank, T; a dispatch of fewer rows meets as many of each other rank.
            like: `[..., H]`, a tensor of the width, dtype and device of the rows.
            clock: told of the time that this takes.
        """
        self.world_size = world_size
        self.next_layer = 0
        """Whose gate routes the strangers of the next dispatch; counts up."""
        self.dispatched_ids: dict[int, Tensor] = {}
        """Experts of all rows of the last dispatch of each layer."""
        self._own = most_rows
        self._rows = like.new_zeros(world_size * most_rows, like.shape[-1])
        self._routing: list[tuple[Tensor, Tensor]] = []
        self._clock = clock

    @property
    def strangers(self) -> Tensor:
        """`[(world_size - 1) * T, H]`, rows of the other ranks."""
        return self._rows[self._own :]

    def draw(self, blocks: Sequence[Block], generator: torch.Generator) -> None:
        """Fresh rows of the others for the next step, routed by the gate of every block; not a part of a step."""
        self.next_layer = 0
        self.strangers.normal_(generator=generator)
        self._routing = []
        for block in blocks:
            phase, operator = next(iter(block.moe.items()))
            routing = operator.route(self.strangers, block.moe_weights[phase])
            ids, weights = (part.new_empty(len(self._rows), part.shape[1]) for part in routing)
            ids[self._own :], weights[self._own :] = routing
            self._routing.append((ids, weights))

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
        """This rank's rows, followed by as many of each other rank; what lies there lasts until the next dispatch."""
        with self._clock.stage(MADE_UP):
            parts = (self._rows, *self._routing[self.next_layer])
            begin, end = self._own - len(x), self._own + (self.world_size - 1) * len(x)
            for part, own in zip(parts, (x, topk_ids, topk_weights), strict=True):
                part[begin : self._own] = own
            rows, ids, weights = (part[begin:end] for part in parts)
        self.dispatched_ids[self.next_layer] = ids
        self.next_layer += 1
        return Arrived(Dispatched(rows, ids, weights, handle=len(x)))

    def combine(self, partial: Tensor, handle: Any) -> Arrived[Tensor]:
        """The partial sums of this rank's own rows."""
        return Arrived(partial[:handle])

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Arrived[tuple[Tensor, ...]]:
        """Rows of tables that hold a part of the real ones: row numbers are taken modulo their length."""
        return Arrived(tuple(table[(row_ids % len(table)).to(table.device)].to(row_ids.device) for table in tables))
