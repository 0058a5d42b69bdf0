"""`naive`: the reference attention, a gather and a masked softmax (spec 3.8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from minideepinfer.cache.layouts import EntryFormat, PlainEntries, cache_layout
from minideepinfer.model.rope import undo_rope
from minideepinfer.operators import Batch, BuildContext, Selection, Stage, StageClock
from minideepinfer.operators.problem import AttentionProblem
from torch import Tensor

_ROWS = 32
"""Rows attended at once; bounds memory."""
_ALIGNED = 16
"""Numbers of a vector register, and of a cache line."""
_NEW = PlainEntries(torch.float32)
"""How this step's entries are read, whatever the cache's layout."""


@dataclass(frozen=True, eq=False)
class _Metadata:
    """What every row needs to find its keys; `first_row` and `context` are those of the row's request, `[T, 1]`."""

    batch: Batch
    first_row: Tensor
    context: Tensor
    visible: Tensor


@dataclass(frozen=True, eq=False)
class _Keys:
    """float32 `[n, N, D]` with zeros in invalid places, and which places are valid, `[n, N]`."""

    values: Tensor
    valid: Tensor

    def followed_by(self, more: _Keys) -> _Keys:
        """These keys and others behind them."""
        return _Keys(torch.cat([self.values, more.values], 1), torch.cat([self.valid, more.valid], 1))


class NaiveAttention:
    """See `AttentionOperator`.

    Logits, exponentials and denominator are float32. In bfloat16 the exponentials are rounded to bfloat16 for the
    product with the values, as the reference does; the maximum is that of the whole row, not a running one.
    Rows are taken in groups of one size, the last group filled up with copies, so that every product has the same
    shape and a row's result does not depend on how many other rows there are; nor on its place among them, since keys
    and channels are filled up to `_ALIGNED`: a matrix product may sum in another order where memory is not aligned.
    """

    def __init__(self, problem: AttentionProblem, clock: StageClock) -> None:
        self._problem = problem
        self._layout = cache_layout(problem.cache_layout)
        self._clock = clock

    def prepare(self, batch: Batch) -> _Metadata:
        """Look up per row what belongs to its request."""
        context = torch.tensor(batch.context_lens, dtype=torch.int64, device=batch.positions.device)
        visible = batch.visible_entries(self._problem.compress_ratio or 1)
        return _Metadata(
            batch,
            first_row=batch.cu_seqlens[batch.request_ids].long().unsqueeze(1),
            context=context[batch.request_ids].unsqueeze(1),
            visible=visible.unsqueeze(1),
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
        metadata: _Metadata,
    ) -> Tensor:
        """See `AttentionOperator.run`."""
        num_rows = q.shape[0]
        output = torch.empty_like(q)
        for start in range(0, num_rows, _ROWS):
            rows = torch.arange(start, start + _ROWS, device=q.device).clamp(max=num_rows - 1)
            with self._clock.stage(Stage.KEY_GATHER):
                keys = self._window_keys(window_new, window_ring, metadata, rows)
                if selection is not None and global_kv is not None:
                    keys = keys.followed_by(_selected_keys(global_kv, self._layout.main, selection, metadata, rows))
            heads = undo_rope(_softmax_attention(q[rows], keys, sink, scale), cos[rows], sin[rows])
            heads = heads.masked_fill(~keys.valid.any(1)[:, None, None], 0.0)
            output[start : start + _ROWS] = heads[: num_rows - start]
        return output

    def _window_keys(self, new: Tensor, ring: Tensor, metadata: _Metadata, rows: Tensor) -> _Keys:
        """The window of each row, from this step's entries or from the ring: N = sliding_window."""
        batch, window = metadata.batch, self._problem.sliding_window
        request, context = batch.request_ids[rows], metadata.context[rows]
        offsets = torch.arange(1 - window, 1, device=new.device)
        positions = batch.positions[rows].unsqueeze(1) + offsets
        valid = positions >= batch.window_start[request].clamp(min=0).unsqueeze(1)
        is_new = valid & (positions >= context)
        is_old = valid & (positions < context)
        from_step = _gather(new, metadata.first_row[rows] + positions - context, is_new, _NEW)
        slots = batch.ring_table[request].unsqueeze(1) * ring.shape[1] + positions % ring.shape[1]
        from_ring = _gather(ring.flatten(0, 1), slots, is_old, self._layout.window)
        return _Keys(torch.where(is_new.unsqueeze(-1), from_step, from_ring), valid)


def _selected_keys(pool: Tensor, form: EntryFormat, selection: Selection, metadata: _Metadata, rows: Tensor) -> _Keys:
    """The entries that each row selected, found through the block table: N = K."""
    batch, per_page = metadata.batch, pool.shape[1]
    entries = selection.indices[rows].long()
    valid = (entries >= 0) & (entries < metadata.visible[rows])
    if selection.lens is not None:
        valid &= torch.arange(entries.shape[1], device=pool.device) < selection.lens[rows].unsqueeze(1)
    entries = entries.where(valid, 0)
    pages = batch.block_table[batch.request_ids[rows].unsqueeze(1), entries // per_page].long()
    return _Keys(_gather(pool.flatten(0, 1), pages * per_page + entries % per_page, valid, form), valid)


def _gather(table: Tensor, index: Tensor, valid: Tensor, form: EntryFormat) -> Tensor:
    """Entries of a table `[M, row]`, exactly zero (whatever memory holds) where not valid: float32 `[n, N, D]`."""
    entries = table[index.where(valid, 0)]
    return form.decode(entries, torch.float32).masked_fill(~valid.unsqueeze(-1), 0.0)


def _softmax_attention(q: Tensor, keys: _Keys, sink: Tensor | None, scale: float) -> Tensor:
    """Heads `[n, H, D]` in q's dtype, before the rotation back; a row without keys may hold NaN."""
    channels, fill = q.shape[-1], -keys.valid.shape[1] % _ALIGNED
    values = F.pad(keys.values, (0, -channels % _ALIGNED, 0, fill))
    logits = (F.pad(q, (0, -channels % _ALIGNED)).float() @ values.mT) * scale
    logits = logits.masked_fill(~F.pad(keys.valid, (0, fill)).unsqueeze(1), -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    if sink is not None:
        peak = peak.maximum(sink[:, None])
    weights = (logits - peak).exp()
    denominator = weights.sum(-1, keepdim=True)
    if sink is not None:
        denominator = denominator + (sink[:, None] - peak).exp()
    return (weights.to(q.dtype).float() @ values / denominator)[..., :channels].to(q.dtype)


def build(context: BuildContext) -> NaiveAttention:
    """Build `naive`."""
    return NaiveAttention(context.problem, context.clock)
