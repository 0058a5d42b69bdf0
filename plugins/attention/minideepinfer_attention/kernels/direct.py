"""Attention that finds its keys itself: window entries in the rings and in this step, selected ones through the pages.

Tiling: a program takes one token, 64 query heads in M (16 where there are few rows), and a range of its keys, 64 at a
time, its window first. With one range it writes the heads; with more, so that few tokens fill the chip, it writes
float32 sums that `combine_kernel` adds in the order of the ranges. Registers hold the 64 x 512 float32 sums, shared
memory q (64 KiB) and two tiles of keys (64 KiB each); with 16 heads a quarter of sums and q. Nothing is copied or
gathered before, and no table but the caller's is read. Packed keys are decoded in registers, 32 at a time and for 16 or
32 heads (245 and 252 registers, no spills, up to 180 KiB of shared memory): T = 1 to 16 about as long as plain ones,
T = 64 0.147 ms against 0.082.
On one H200 at 64 x 512, 512 + 128 keys: T = 1 0.016 ms, T = 16 0.033, waiting in turn for tables, keys and partial sums
(floors: 0.0002 and 0.003, bytes); T = 4096 2.38, see docs/findings.md.
"""

from __future__ import annotations

import triton
import triton.language as tl
from minideepinfer.triton_casts import INTERPRETED

from minideepinfer_attention.kernels.packed import main_values, window_values
from minideepinfer_attention.kernels.tiles import LOG2E, NO_KEY, finish_row, online_step


@triton.jit
def _pool_rows(block_table, entry, visible, per_page):
    """Rows of the pool; -1 where an entry does not count."""
    valid = (entry >= 0) & (entry < visible)
    page = tl.load(block_table + entry // per_page, mask=valid, other=0)
    return tl.where(valid, page * per_page + entry % per_page, -1)


@triton.jit(
    do_not_specialize=[
        "num_heads", "num_window", "ring_size", "max_pages", "per_page", "ratio", "topk", "has_lens", "window_tiles",
        "num_tiles", "tiles_per_split", "rope_dim",
    ]
)  # fmt: skip
def direct_kernel(
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
    window_tiles,
    num_tiles,
    tiles_per_split,
    rope_dim,
    PACKED: tl.constexpr,
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
    position = tl.load(positions + token).to(tl.int32)
    peak = tl.full([BLOCK_H], NO_KEY, tl.float32)
    total = tl.full([BLOCK_H], 0.0, tl.float32)
    acc = tl.full([BLOCK_H, BLOCK_D], 0.0, tl.float32)
    first = split * tiles_per_split
    stop = tl.minimum(first + tiles_per_split, num_tiles)

    oldest = tl.where(position >= 0, tl.maximum(tl.load(window_start + request), 0).to(tl.int32), 2147483647)
    context = tl.load(context_lens + request).to(tl.int32)
    new_ptr += tl.load(cu_seqlens + request).to(tl.int64) * DIM
    ring_ptr += tl.load(ring_table + request) * ring_size * (DIM + DIM // 32 if PACKED else DIM)
    for tile in range(first, tl.minimum(stop, window_tiles)):
        slot = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        its_position = position - num_window + 1 + slot
        valid = (slot < num_window) & (its_position >= oldest)
        row = tl.where(its_position >= context, its_position - context, its_position % ring_size)
        mask = valid[:, None] & (channel < DIM)[None, :]
        if PACKED:
            is_new = (its_position >= context)[:, None]
            old = window_values(ring_ptr, row.to(tl.int64), channel[None, :], mask & (is_new == 0), product, DIM)
            new = tl.load(new_ptr + (row * DIM)[:, None] + channel[None, :], mask=mask & is_new, other=0.0)
            keys = tl.where(is_new, new.to(product), old)
        else:
            key_ptr = tl.where(its_position >= context, new_ptr, ring_ptr) + row.to(tl.int64) * DIM
            keys = tl.load(key_ptr[:, None] + channel[None, :], mask=mask, other=0.0).to(product)
        peak, total, acc = online_step(q, keys, valid, scale, peak, total, acc, num_heads, dtype)

    visible = (position + 1) // ratio
    block_table += request * max_pages
    index_ptr += token * topk
    topk = tl.minimum(topk, tl.load(lens_ptr + token, mask=has_lens != 0, other=2147483647))
    first = tl.maximum(first - window_tiles, 0)
    slot = first * BLOCK_K + tl.arange(0, BLOCK_K)
    entry = tl.load(index_ptr + slot, mask=slot < topk, other=-1)
    rows = _pool_rows(block_table, entry, visible, per_page)
    slot += BLOCK_K
    entry = tl.load(index_ptr + slot, mask=slot < topk, other=-1)
    for _ in range(first, stop - window_tiles):
        if PACKED:
            keys = main_values(pool_ptr, rows.to(tl.int64), rows >= 0, product, DIM, BLOCK_D)
        else:
            mask = (rows >= 0)[:, None] & (channel < DIM)[None, :]
            key_ptr = pool_ptr + rows.to(tl.int64) * DIM
            keys = tl.load(key_ptr[:, None] + channel[None, :], mask=mask, other=0.0).to(product)
        ahead = _pool_rows(block_table, entry, visible, per_page)
        slot += BLOCK_K
        entry = tl.load(index_ptr + slot, mask=slot < topk, other=-1)
        peak, total, acc = online_step(q, keys, rows >= 0, scale, peak, total, acc, num_heads, dtype)
        rows = ahead

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
def combine_kernel(
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
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add the sums of one token and one head, all splits at once."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, channel = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    row = (split * tl.num_programs(0) + token) * num_heads + head
    inside = (split < num_splits)[:, None] & (channel < DIM)[None, :]
    part = tl.load(partial_ptr + row[:, None] * DIM + channel[None, :], mask=inside, other=0.0)
    peaks = tl.load(peak_ptr + row, mask=split < num_splits, other=NO_KEY)
    totals = tl.load(total_ptr + row, mask=split < num_splits, other=0.0)
    peak = tl.max(peaks, 0)
    weights = tl.exp2(peaks - peak)
    acc = tl.sum(part * weights[:, None], 0)[None, :]
    total, peak = tl.sum(totals * weights, 0) + tl.full([1], 0.0, tl.float32), peak + tl.full([1], 0.0, tl.float32)
    sink = tl.load(sink_ptr + head) * LOG2E
    heads = finish_row(acc, total, peak, sink, cos_ptr, sin_ptr, token, rope_dim, out_ptr.dtype.element_ty, DIM)
    place = (token * num_heads + head) * DIM + channel[None, :]
    tl.store(out_ptr + place, heads, mask=(channel < DIM)[None, :])
