"""A comm operator between processes, as small as can be: everybody gets everything; the kit is tried on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from minideepinfer.operators import Arrived, BuildContext, Dispatched
from torch import Tensor


class GlooComm:
    sent_bytes = 0

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def prepare(self, counts: Sequence[int]) -> GlooComm:
        return self

    def _everybodys(self, x: Tensor) -> list[Tensor]:
        """The ranks' tensors, which differ in their number of rows."""
        shapes: list[Any] = [None] * self.world_size
        dist.all_gather_object(shapes, tuple(x.shape))
        longest = max(shape[0] for shape in shapes)
        padded = torch.zeros(longest, *x.shape[1:], dtype=x.dtype)
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(parts, padded)
        return [part[: shape[0]] for part, shape in zip(parts, shapes, strict=True)]

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return torch.cat(self._everybodys(x))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return torch.stack(self._everybodys(x)).sum(0).split(list(counts))[self.rank]

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Arrived[Dispatched]:
        counts = [len(part) for part in self._everybodys(topk_ids)]
        parts = (torch.cat(self._everybodys(tensor)) for tensor in (x, topk_ids, topk_weights))
        return Arrived(Dispatched(*parts, handle=counts))

    def combine(self, partial: Tensor, handle: Any) -> Arrived[Tensor]:
        return Arrived(self.reduce_scatter(partial, handle))

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Arrived[tuple[Tensor, ...]]:
        return Arrived(tuple(torch.cat(self._everybodys(table))[row_ids] for table in tables))


class NextRanksTokens(GlooComm):
    """Brings home what belongs to another rank."""

    def combine(self, partial: Tensor, handle: Any) -> Arrived[Tensor]:
        return Arrived(self.reduce_scatter(partial.roll(1, 0), handle))


class Raises(GlooComm):
    """Rank 1 fails while the others wait for it."""

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Arrived[Dispatched]:
        if self.rank == 1:
            raise ValueError("no route to host")
        return super().dispatch(x, topk_ids, topk_weights)


class Dies(GlooComm):
    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Arrived[Dispatched]:
        if self.rank == 1:
            os._exit(3)
        return super().dispatch(x, topk_ids, topk_weights)


def build(context: BuildContext) -> GlooComm:
    return GlooComm()


def build_wrong(context: BuildContext) -> GlooComm:
    return NextRanksTokens()


def build_raising(context: BuildContext) -> GlooComm:
    return Raises()


def build_dying(context: BuildContext) -> GlooComm:
    return Dies()
