"""Attention that finds its keys itself: window entries in the rings and in this step, selected ones through the pages.

Tiling: a program takes one token, 64 query heads in M, and a range of its keys, 32 at a time (window first). With one
range it writes the heads; with more, so that few tokens fill the chip, it writes float32 sums that `_combine_kernel`
adds in the order of the ranges. Registers hold the 64 x 512 float32 sums, shared memory q (64 KiB) and the keys.
Nothing is copied or gathered before, and no table but the caller's is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from minideepinfer.operators import Batch, Selection
from torch import Tensor

from minideepinfer_attention.tiles import INTERPRETED, LOG2E, NO_KEY, finish_row, head_tile, online_step


@triton.jit
def _entries(index_ptr, token, slot, num_window, topk, stop):
    """What the selection says in some slots, of which the first `num_window` are the window's; -1 where nothing."""
    inside = (slot >= num_window) & (slot - num_window < stop)
    return tl.load(index_ptr + token * topk + slot - num_window, mask=inside, other=-1)


@triton.jit(
    do_not_specialize=[
        "num_heads", "num_window", "ring_size", "max_pages", "per_page", "ratio", "topk", "has_lens", "num_tiles",
        "tiles_per_split", "rope_dim",
    ]
)  # fmt: skip
def _direct_kernel(
    q_ptr,
    new_ptr,
    ring_ptr,
    pool_ptr,
    index_ptr,
    lens_ptr,
    positions,
    request_ids,
    cu_seqlens,
    context_lens,
    ring_table,
    window_start,
    block_table,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    partial_ptr,
    total_ptr,
    peak_ptr,
    scale,
    num_heads,
    num_window,
    ring_size,
    max_pages,
    per_page,
    ratio,
    topk,
    has_lens,
    num_tiles,
    tiles_per_split,
    rope_dim,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head, channel = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (head < num_heads)[:, None] & (channel < DIM)[None, :]
    place = (token * num_heads + head)[:, None] * DIM + channel[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    product: tl.constexpr = tl.float32 if INTERPRETED else dtype
    q = tl.load(q_ptr + place, mask=inside, other=0.0).to(product)

    request = tl.load(request_ids + token)
    position = tl.load(positions + token)
    oldest = tl.where(position >= 0, tl.maximum(tl.load(window_start + request), 0), 1 << 62)
    context = tl.load(context_lens + request)
    first_new = new_ptr + (tl.load(cu_seqlens + request) - context) * DIM
    ring = ring_ptr + tl.load(ring_table + request) * ring_size * DIM
    stop = tl.minimum(topk, tl.load(lens_ptr + token, mask=has_lens != 0, other=2147483647))
    visible = (position + 1) // ratio

    peak = tl.full([BLOCK_H], NO_KEY, tl.float32)
    total = tl.full([BLOCK_H], 0.0, tl.float32)
    acc = tl.full([BLOCK_H, BLOCK_D], 0.0, tl.float32)
    first = split * tiles_per_split
    slot = first * BLOCK_K + tl.arange(0, BLOCK_K)
    entry = _entries(index_ptr, token, slot, num_window, topk, stop)
    for _ in range(first, tl.minimum(first + tiles_per_split, num_tiles)):
        its_position = position - num_window + 1 + slot
        in_window = (slot < num_window) & (its_position >= oldest)
        is_new = its_position >= context
        selected = (entry >= 0) & (entry < visible)
        page = tl.load(block_table + request * max_pages + entry // per_page, mask=selected, other=0)
        row = page.to(tl.int64) * per_page + entry % per_page
        row = tl.where(in_window, tl.where(is_new, its_position, its_position % ring_size), row)
        key_ptr = tl.where(in_window, tl.where(is_new, first_new, ring), pool_ptr) + row * DIM
        valid = in_window | selected
        mask = valid[:, None] & (channel < DIM)[None, :]
        keys = tl.load(key_ptr[:, None] + channel[None, :], mask=mask, other=0.0).to(product)
        slot += BLOCK_K
        entry = _entries(index_ptr, token, slot, num_window, topk, stop)
        peak, total, acc = online_step(q, keys, valid, scale, peak, total, acc, dtype)

    if partial_ptr is None:
        sink = tl.load(sink_ptr + head, mask=head < num_heads, other=0.0) * LOG2E
        heads = finish_row(acc, total, peak, sink, cos_ptr, sin_ptr, token, rope_dim, dtype, DIM)
        tl.store(out_ptr + place, heads, mask=inside)
    else:
        row = (split * tl.num_programs(0) + token) * num_heads + head
        tl.store(partial_ptr + row[:, None] * DIM + channel[None, :], acc, mask=inside)
        tl.store(total_ptr + row, total, mask=head < num_heads)
        tl.store(peak_ptr + row, peak, mask=head < num_heads)


@triton.jit(do_not_specialize=["num_heads", "num_splits", "rope_dim"])
def _combine_kernel(
    partial_ptr,
    total_ptr,
    peak_ptr,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    num_splits,
    rope_dim,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add the sums of one token and `BLOCK_H` heads, split after split."""
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    real = head < num_heads
    inside = real[:, None] & (channel < DIM)[None, :]
    peak = tl.full([BLOCK_H], NO_KEY, tl.float32)
    total = tl.full([BLOCK_H], 0.0, tl.float32)
    acc = tl.full([BLOCK_H, BLOCK_D], 0.0, tl.float32)
    for split in range(num_splits):
        row = (split * tl.num_programs(0) + token) * num_heads + head
        its_peak = tl.load(peak_ptr + row, mask=real, other=0.0)
        its_total = tl.load(total_ptr + row, mask=real, other=0.0)
        part = tl.load(partial_ptr + row[:, None] * DIM + channel[None, :], mask=inside, other=0.0)
        top = tl.maximum(peak, its_peak)
        old, new = tl.exp2(peak - top), tl.exp2(its_peak - top)
        total = total * old + its_total * new
        acc = acc * old[:, None] + part * new[:, None]
        peak = top
    sink = tl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E
    heads = finish_row(acc, total, peak, sink, cos_ptr, sin_ptr, token, rope_dim, out_ptr.dtype.element_ty, DIM)
    tl.store(out_ptr + (token * num_heads + head)[:, None] * DIM + channel[None, :], heads, mask=inside)


@dataclass(frozen=True, eq=False)
class DirectMetadata:
    """A batch, and the positions of its requests' first rows: int64 `[R]` on the device."""

    batch: Batch
    context_lens: Tensor

    @classmethod
    def of(cls, batch: Batch) -> DirectMetadata:
        """The metadata of a batch."""
        context = torch.tensor(batch.context_lens, dtype=torch.int64, device=batch.positions.device)
        return cls(batch, context)


def direct_attention(
    q: Tensor,
    window_new: Tensor,
    window_ring: Tensor,
    global_kv: Tensor | None,
    selection: Selection | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    metadata: DirectMetadata,
    window: int,
    ratio: int,
    programs: int,
) -> Tensor:
    """Attend, with the keys where they are; the first arguments are those of `AttentionOperator.run`.

    Args:
        sink: float32 `[H]`; -inf = none.
        window: entries of a window.
        ratio: tokens per global entry; 0 = there is none.
        programs: as many at least, where there are keys enough, shall share the work.

    Returns:
        `[T, H, D]`; other bits for another number of ranges.
    """
    batch = metadata.batch
    num_tokens, num_heads, dim = q.shape
    out = torch.empty_like(q)
    if not num_tokens:
        return out
    tile = head_tile(num_heads, dim, q.dtype)
    tile["BLOCK_K"] = min(tile["BLOCK_K"], 32)
    head_tiles = triton.cdiv(num_heads, tile["BLOCK_H"])
    topk = 0 if selection is None else selection.indices.shape[1]
    num_tiles = triton.cdiv(window + topk, tile["BLOCK_K"])
    tiles_per_split = triton.cdiv(num_tiles, max(1, programs // (num_tokens * head_tiles)))
    num_splits = triton.cdiv(num_tiles, tiles_per_split)
    partial = total = peak = None
    if num_splits > 1:
        partial = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        total, peak = torch.empty(2, num_splits, num_tokens, num_heads, dtype=torch.float32, device=q.device)
    pool = window_ring if global_kv is None else global_kv
    indices = batch.block_table if selection is None else selection.indices
    lens = None if selection is None else selection.lens
    rope_dim = 2 * cos.shape[1]
    _direct_kernel[num_tokens, head_tiles, num_splits](
        q,
        window_new,
        window_ring,
        pool,
        indices,
        indices if lens is None else lens,
        batch.positions,
        batch.request_ids,
        batch.cu_seqlens,
        metadata.context_lens,
        batch.ring_table,
        batch.window_start,
        batch.block_table,
        sink,
        cos,
        sin,
        out,
        partial,
        total,
        peak,
        scale * LOG2E,
        num_heads,
        window,
        window_ring.shape[1],
        batch.block_table.shape[1],
        pool.shape[1],
        max(ratio, 1),
        topk,
        int(lens is not None),
        num_tiles,
        tiles_per_split,
        rope_dim,
        DIM=dim,
        **tile,
    )
    if partial is not None:
        block_h = min(8, triton.next_power_of_2(num_heads))
        _combine_kernel[num_tokens, triton.cdiv(num_heads, block_h)](
            partial,
            total,
            peak,
            sink,
            cos,
            sin,
            out,
            num_heads,
            num_splits,
            rope_dim,
            DIM=dim,
            BLOCK_H=block_h,
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=4,
        )
    return out
