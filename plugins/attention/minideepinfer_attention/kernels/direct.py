"""Attention that finds its keys itself: window entries in the rings and in this step, selected ones through the pages.

Tiling: a program takes one token, 64 query heads in M, and a range of its keys, 32 at a time (window first). With one
range it writes the heads; with more, so that few tokens fill the chip, it writes float32 sums that `combine_kernel`
adds in the order of the ranges. Registers hold the 64 x 512 float32 sums, shared memory q (64 KiB) and the keys.
Nothing is copied or gathered before, and no table but the caller's is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minideepinfer_attention.kernels.tiles import INTERPRETED, LOG2E, NO_KEY, finish_row, online_step


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
