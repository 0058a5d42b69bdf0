"""`acme-tiled`: attention over tiles of keys, with a running maximum and denominator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from minideepinfer.model.rope import undo_rope
from minideepinfer.operators import AttentionProblem, Batch, BuildContext, Selection
from torch import Tensor

from acme_ops.plugin import TiledOptions


@dataclass(frozen=True, eq=False)
class Keys:
    """Where the keys of each row lie: row numbers of a table `[M, D]`, and which of them exist, both `[T, N]`."""

    table: Tensor
    rows: Tensor
    valid: Tensor

    def tile(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """float32 keys `[T, n, D]`, zero where there is none (what memory holds there may be NaN), and validity."""
        rows, valid = self.rows[:, start : start + size], self.valid[:, start : start + size]
        keys = self.table[rows.where(valid, 0)].float()
        return keys.masked_fill(~valid.unsqueeze(-1), 0.0), valid


@dataclass(frozen=True, eq=False)
class Metadata:
    """Per row of the batch: window positions `[T, W]`, and what finds them and the selected entries."""

    batch: Batch
    positions: Tensor
    exists: Tensor
    is_new: Tensor
    new_rows: Tensor
    visible: Tensor


class RunningSoftmax:
    """Softmax-weighted sum of keys that arrive in tiles; the sink starts the denominator."""

    def __init__(self, q: Tensor, sink: Tensor | None, scale: float) -> None:
        self.q, self.scale = q.float(), scale
        rows, heads, _ = q.shape
        # A finite floor: a tile without any key then leaves everything as it is, with no inf - inf.
        self.peak = q.new_full((rows, heads, 1), -1e30, dtype=torch.float32)
        self.total = torch.zeros_like(self.peak)
        self.sum = torch.zeros_like(self.q)
        if sink is not None:
            self.peak = self.peak.maximum(sink[:, None])
            self.total = (sink[:, None] - self.peak).exp()

    def add(self, keys: Tensor, valid: Tensor) -> None:
        """Attend to a tile of keys `[T, n, D]`."""
        logits = (self.q @ keys.mT * self.scale).masked_fill(~valid.unsqueeze(1), -torch.inf)
        peak = self.peak.maximum(logits.amax(-1, keepdim=True))
        weights, rescale = (logits - peak).exp(), (self.peak - peak).exp()
        self.total = self.total * rescale + weights.sum(-1, keepdim=True)
        self.sum = self.sum * rescale + weights @ keys
        self.peak = peak

    def result(self) -> Tensor:
        """float32 `[T, H, D]`; zero where there was no key."""
        return self.sum / self.total.masked_fill(self.total == 0, 1.0)


class TiledAttention:
    """See `minideepinfer.operators.AttentionOperator`."""

    def __init__(self, problem: AttentionProblem, tile_size: int) -> None:
        self._problem = problem
        self._tile_size = tile_size

    def prepare(self, batch: Batch) -> Metadata:
        """Find the window of every row."""
        device, request = batch.positions.device, batch.request_ids
        context = torch.tensor(batch.context_lens, dtype=torch.int64, device=device)[request].unsqueeze(1)
        positions = batch.positions.unsqueeze(1) + torch.arange(1 - self._problem.sliding_window, 1, device=device)
        return Metadata(
            batch,
            positions,
            exists=positions >= batch.window_start[request].clamp(min=0).unsqueeze(1),
            is_new=positions >= context,
            new_rows=batch.cu_seqlens[request].unsqueeze(1) + positions - context,
            visible=batch.visible_entries(max(self._problem.compress_ratio, 1)).unsqueeze(1),
        )

    def run(
        self,
        q: Tensor,
        window_new: Tensor,
        window_ring: Tensor,
        global_kv: Tensor | None,
        selection: Selection | None,
        sink: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        scale: float,
        metadata: Metadata,
    ) -> Tensor:
        """Attend to old window entries, new ones and selected ones, in tiles."""
        sources = [_old_window(window_ring, metadata), _new_window(window_new, metadata)]
        if global_kv is not None and selection is not None:
            sources.append(_selected(global_kv, selection, metadata))
        softmax = RunningSoftmax(q, sink, scale)
        for source in sources:
            for start in range(0, source.rows.shape[1], self._tile_size):
                softmax.add(*source.tile(start, self._tile_size))
        return undo_rope(softmax.result().to(q.dtype), cos, sin)


def _old_window(ring: Tensor, metadata: Metadata) -> Keys:
    rings = metadata.batch.ring_table[metadata.batch.request_ids].unsqueeze(1)
    slots = rings * ring.shape[1] + metadata.positions % ring.shape[1]
    return Keys(ring.flatten(0, 1), slots, metadata.exists & ~metadata.is_new)


def _new_window(new: Tensor, metadata: Metadata) -> Keys:
    return Keys(new, metadata.new_rows, metadata.exists & metadata.is_new)


def _selected(pool: Tensor, selection: Selection, metadata: Metadata) -> Keys:
    per_page, entries = pool.shape[1], selection.indices.long()
    valid = (entries >= 0) & (entries < metadata.visible)
    if selection.lens is not None:
        valid &= torch.arange(entries.shape[1], device=entries.device) < selection.lens.unsqueeze(1)
    entries = entries.where(valid, 0)
    pages = metadata.batch.block_table[metadata.batch.request_ids.unsqueeze(1), entries // per_page].long()
    return Keys(pool.flatten(0, 1), pages * per_page + entries % per_page, valid)


def build(context: BuildContext) -> TiledAttention:
    """Build the operator."""
    assert isinstance(context.options, TiledOptions)
    return TiledAttention(context.problem, context.options.tile_size)
