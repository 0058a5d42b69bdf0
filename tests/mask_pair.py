"""An indexer and an attention operator with a selection layout of their own: one bool for each entry of the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from minideepinfer.operators import BuildContext, IndexerOutput, Selection
from minideepinfer_attention.naive import NaiveAttention
from minideepinfer_indexer.naive import NaiveIndexer
from torch import Tensor

LAYOUT = "entry_mask/1"


@dataclass(frozen=True, eq=False)
class EntryMask:
    """Layout `entry_mask/1`: bool `[T, N]`, whether a row attends to an entry of its request."""

    named: Tensor


class MaskIndexer(NaiveIndexer):
    def run(self, *arguments: Any) -> IndexerOutput:
        output = super().run(*arguments)
        indices = output.selection.indices.long()
        width = int(indices.max()) + 1 if indices.numel() else 0
        named = torch.zeros(len(indices), width + 1, dtype=torch.bool)
        named.scatter_(1, indices.where(indices >= 0, width), True)
        return IndexerOutput(EntryMask(named[:, :width]), output.candidates)  # type: ignore[arg-type]


class MaskAttention(NaiveAttention):
    first = 0

    def run(self, *arguments: Any, **named: Any) -> Tensor:
        names = ["q", "window_new", "window_ring", "global_kv", "selection", "sink", "cos", "sin", "scale", "metadata"]
        given = dict(zip(names, arguments, strict=False)) | named
        if given["selection"] is not None:
            given["selection"] = self._indices(given["selection"].named)
        return super().run(**given)

    def _indices(self, named: Tensor) -> Selection:
        numbers = torch.arange(self.first, self.first + named.shape[1]).where(named, -1)
        topk = self._problem.index_topk
        best = numbers.sort(1, descending=True).values[:, :topk]
        return Selection(F.pad(best, (0, topk - best.shape[1]), value=-1).int())


class ShiftedAttention(MaskAttention):
    """Takes entries for their neighbours."""

    first = -1


def build_indexer(context: BuildContext) -> MaskIndexer:
    return MaskIndexer(context.problem)


def build_attention(context: BuildContext) -> MaskAttention:
    return MaskAttention(context.problem, context.clock)


def build_shifted(context: BuildContext) -> MaskAttention:
    return ShiftedAttention(context.problem, context.clock)
