"""Copying windows into one buffer, and finding selected entries in the pool: both bound by memory, and small.

Tiling: a program of `window_buffer_kernel` copies BLOCK chunks of 8 channels, one of `pool_rows_kernel` turns
BLOCK_T x BLOCK_K selected entries into rows of the pool; each number is in registers once.
At T = 4096 behind 126,976, 512 + 128 keys on one H200: windows 0.008 ms, rows of the pool 0.018. Floors: the bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minideepinfer_attention.kernels.packed import window_values


@triton.jit(do_not_specialize=["num_rows", "ring_size"])
def window_buffer_kernel(
    out_ptr,
    new_ptr,
    ring_ptr,
    new_rows,
    ring_rows,
    positions,
    num_rows,
    ring_size,
    PACKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy `BLOCK` chunks of 8 channels; rows that are neither new nor in a ring become zero."""
    chunk = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, channel = chunk // (DIM // 8), chunk % (DIM // 8) * 8
    inside = row < num_rows
    new = tl.load(new_rows + row, mask=inside, other=-1)
    ring = tl.load(ring_rows + row, mask=inside, other=-1)
    slot = ring.to(tl.int64) * ring_size + tl.load(positions + row, mask=inside, other=0) % ring_size
    lane = channel[:, None] + tl.arange(0, 8)[None, :]
    from_new = tl.load(new_ptr + new.to(tl.int64)[:, None] * DIM + lane, mask=(new >= 0)[:, None], other=0.0)
    if PACKED:
        from_ring = window_values(ring_ptr, slot, lane, (ring >= 0)[:, None], out_ptr.dtype.element_ty, DIM)
    else:
        from_ring = tl.load(ring_ptr + slot[:, None] * DIM + lane, mask=(ring >= 0)[:, None], other=0.0)
    value = tl.where((new >= 0)[:, None], from_new, from_ring.to(out_ptr.dtype.element_ty))
    tl.store(out_ptr + row[:, None] * DIM + lane, value, mask=inside[:, None])


@triton.jit(do_not_specialize=["num_tokens", "ratio", "max_pages", "per_page", "topk"])
def pool_rows_kernel(
    out_ptr,
    index_ptr,
    lens_ptr,
    positions,
    request_ids,
    block_table,
    num_tokens,
    ratio,
    max_pages,
    per_page,
    topk,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Turn the selections of `BLOCK_T` tokens into rows of the pool, `BLOCK_K` slots at a time."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    real = token < num_tokens
    stop = tl.full([BLOCK_T], topk, tl.int32)
    if lens_ptr is not None:
        stop = tl.minimum(stop, tl.load(lens_ptr + token, mask=real, other=0))
    visible = ((tl.load(positions + token, mask=real, other=-1) + 1) // ratio).to(tl.int32)
    table = block_table + tl.load(request_ids + token, mask=real, other=0) * max_pages
    inside = real[:, None] & (slot[None, :] < stop[:, None])
    entry = tl.load(index_ptr + token[:, None] * topk + slot[None, :], mask=inside, other=-1)
    valid = (entry >= 0) & (entry < visible[:, None])
    page = tl.load(table[:, None] + entry // per_page, mask=valid, other=0)
    row = tl.where(valid, page * per_page + entry % per_page, -1)
    tl.store(out_ptr + token[:, None] * topk + slot[None, :], row, mask=real[:, None] & (slot < topk)[None, :])
