"""Attention of each token to its own list of physical rows: some of a window buffer, then some of a pool.

Tiling: a program takes one token and 64 query heads in M, and its keys 64 at a time. Registers hold the 64 x 512
float32 sums, shared memory q (64 KiB) and two tiles of keys (64 KiB each); row numbers are fetched one tile ahead.
Rows of number -1 are not read; their keys are zero and their weights too. Weights are taken relative to 0, without a
running maximum; programs whose sums leave [2^-80, 2^100] say so, and `again_kernel`, which is no place to be fast, does
their work again.
At T = 4096, 64 x 512, 512 + 128 keys on one H200: 1.20 ms; floor 0.43 to 0.61 (gathered bytes, less what L2 holds).
"""

from __future__ import annotations

import triton
import triton.language as tl
from minideepinfer.triton_casts import INTERPRETED, narrow

from minideepinfer_attention.kernels.tiles import LOG2E, NO_KEY, finish_row, online_step

LEAST = tl.constexpr(2.0**-80)
MOST = tl.constexpr(2.0**100)
"""Sums in between have lost nothing to overflow, or to weights below 2^-126."""
COUNTS = ["num_tokens", "num_heads", "num_window", "num_pool", "window_tiles", "num_tiles", "rope_dim"]
"""Arguments that no kernel here is compiled for anew."""


@triton.jit
def _row_numbers(window_rows, pool_rows, num_window, num_pool, window_tiles, tile, BLOCK_K: tl.constexpr):
    """Row numbers of one tile of keys, -1 where there is none; tiles of the window come first."""
    in_window = tile < window_tiles
    slot = tl.where(in_window, tile, tile - window_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = slot < tl.where(in_window, num_window, num_pool)
    return tl.load(tl.where(in_window, window_rows, pool_rows) + slot, mask=inside, other=-1)


@triton.jit
def _heads(
    q_ptr,
    token,
    head_tile,
    num_heads,
    product: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A tile of one token's heads: their numbers, where they lie, which of that exists, and q as an operand."""
    head, channel = head_tile * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (head < num_heads)[:, None] & (channel < DIM)[None, :]
    place = (token * num_heads + head)[:, None] * DIM + channel[None, :]
    return head, place, inside, tl.load(q_ptr + place, mask=inside, other=0.0).to(product)


@triton.jit
def _keys(window, pool, rows, in_window, product: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile of keys as an operand, zero where the row number is -1."""
    channel = tl.arange(0, BLOCK_D)
    key_ptr = tl.where(in_window, window, pool) + rows.to(tl.int64) * DIM
    mask = (rows >= 0)[:, None] & (channel < DIM)[None, :]
    return tl.load(key_ptr[:, None] + channel[None, :], mask=mask, other=0.0).to(product)


@triton.jit(do_not_specialize=COUNTS)
def sparse_kernel(
    q_ptr,
    window,
    window_rows,
    pool,
    pool_rows,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    lost_ptr,
    scale,
    num_tokens,
    num_heads,
    num_window,
    num_pool,
    window_tiles,
    num_tiles,
    rope_dim,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    product: tl.constexpr = tl.float32 if INTERPRETED else dtype
    head, place, inside, q = _heads(q_ptr, token, tl.program_id(1), num_heads, product, DIM, BLOCK_H, BLOCK_D)
    window_rows += token * num_window
    pool_rows += token * num_pool

    peak = tl.full([BLOCK_H], 0.0, tl.float32)
    sums = tl.full([BLOCK_H, 2, 4], 0.0, tl.float32)
    acc = tl.full([BLOCK_H, BLOCK_D], 0.0, tl.float32)
    ahead = _row_numbers(window_rows, pool_rows, num_window, num_pool, window_tiles, 0, BLOCK_K)
    for tile in range(num_tiles):
        rows = ahead
        keys = _keys(window, pool, rows, tile < window_tiles, product, DIM, BLOCK_D)
        ahead = _row_numbers(window_rows, pool_rows, num_window, num_pool, window_tiles, tile + 1, BLOCK_K)
        logits = tl.dot(q, keys.T, input_precision="ieee") * scale
        probabilities = tl.full([BLOCK_H, BLOCK_K], 0.0, dtype)
        if num_heads > 0:  # always; see `online_step`
            weights = tl.exp2(tl.where((rows >= 0)[None, :], logits, float("-inf")))
            sums += tl.sum(tl.sum(weights.reshape(BLOCK_H, 2, BLOCK_K // 16, 4, 2), 4), 2)
            if INTERPRETED:
                weights = narrow(weights, dtype)
            probabilities = weights.to(dtype)
        acc = tl.dot(probabilities.to(product), keys, acc, input_precision="ieee")
    total = tl.sum(tl.sum(sums, 2), 1)

    sink = tl.load(sink_ptr + head, mask=head < num_heads, other=0.0) * LOG2E
    heads = finish_row(acc, total, peak, sink, cos_ptr, sin_ptr, token, rope_dim, dtype, DIM)
    tl.store(out_ptr + place, heads, mask=inside)
    lost = tl.max(((total >= LEAST) & (total <= MOST)).to(tl.int32) ^ 1, 0)
    tl.store(lost_ptr + token * tl.num_programs(1) + tl.program_id(1), lost)


@triton.jit(do_not_specialize=COUNTS)
def again_kernel(
    q_ptr,
    window,
    window_rows,
    pool,
    pool_rows,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    lost_ptr,
    scale,
    num_tokens,
    num_heads,
    num_window,
    num_pool,
    window_tiles,
    num_tiles,
    rope_dim,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What `sparse_kernel` does, with a running maximum, for the tiles of heads whose sums it lost."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    product: tl.constexpr = tl.float32 if INTERPRETED else dtype
    head_tiles = (num_heads + BLOCK_H - 1) // BLOCK_H
    for work in range(tl.program_id(0), num_tokens * head_tiles, tl.num_programs(0)):
        if tl.load(lost_ptr + work) != 0:
            token = (work // head_tiles).to(tl.int64)
            head, place, inside, q = _heads(q_ptr, token, work % head_tiles, num_heads, product, DIM, BLOCK_H, BLOCK_D)
            its_window, its_pool = window_rows + token * num_window, pool_rows + token * num_pool
            peak = tl.full([BLOCK_H], NO_KEY, tl.float32)
            total = tl.full([BLOCK_H], 0.0, tl.float32)
            acc = tl.full([BLOCK_H, BLOCK_D], 0.0, tl.float32)
            for tile in range(num_tiles):
                rows = _row_numbers(its_window, its_pool, num_window, num_pool, window_tiles, tile, BLOCK_K)
                keys = _keys(window, pool, rows, tile < window_tiles, product, DIM, BLOCK_D)
                peak, total, acc = online_step(q, keys, rows >= 0, scale, peak, total, acc, num_heads, dtype)
            sink = tl.load(sink_ptr + head, mask=head < num_heads, other=0.0) * LOG2E
            heads = finish_row(acc, total, peak, sink, cos_ptr, sin_ptr, token, rope_dim, dtype, DIM)
            tl.store(out_ptr + place, heads, mask=inside)
