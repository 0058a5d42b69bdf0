"""Attention of each row to its own list of physical rows: a window buffer first, then a pool.

Tiling: a program takes one token, 64 query heads in M, and a range of its keys, 64 at a time; with one range it writes
the heads, with more it writes partial sums that `combine` adds in a fixed order. Registers hold the 64 x 512 float32
sums, shared memory q (64 KiB) and two key tiles (64 KiB each); row numbers are fetched one tile ahead of their keys.
Weights are taken relative to 0, without a running maximum; a program whose sums leave [2^-80, 2^100] does its keys
again, relative to their true maximum. Invalid rows (-1) are not read; their keys are zero and their weights too.
Floor at T = 4096, 64 x 512, 512 + 128 keys: 0.61 ms (gathered bytes).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minideepinfer_attention.tiles import LOG2E, dot, finish_row, head_tile, rounded

NO_KEY = tl.constexpr(-1e30)
"""A maximum of no keys; finite, so that nothing is inf minus inf."""
LEAST, MOST = tl.constexpr(2.0**-80), tl.constexpr(2.0**100)
"""Sums in between have lost nothing to overflow, or to weights below 2^-126."""


@triton.jit
def _row_numbers(window_rows, pool_rows, token, tile, window_tiles, num_window, num_pool, BLOCK_K: tl.constexpr):
    """Row numbers of one tile of keys, -1 where there is none; tiles of the window come first."""
    in_window = tile < window_tiles
    slot = (tile - tl.where(in_window, 0, window_tiles)) * BLOCK_K + tl.arange(0, BLOCK_K)
    table = tl.where(in_window, window_rows, pool_rows)
    count = tl.where(in_window, num_window, num_pool)
    return tl.load(table + token.to(tl.int64) * count + slot, mask=slot < count, other=-1)


@triton.jit
def _keys(window, pool, rows, tile, window_tiles, DIM: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    """The keys of one tile, zero where there is none: `[BLOCK_K, BLOCK_D]`."""
    channel = tl.arange(0, BLOCK_D)
    base = tl.where(tile < window_tiles, window, pool)
    mask = (rows >= 0)[:, None] & (channel < DIM)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * DIM + channel[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def _logits(q, keys, rows, scale):
    """Logits `[BLOCK_H, BLOCK_K]` in units of log2(e); -inf where there is no key."""
    logits = dot(q, keys.T, tl.zeros([q.shape[0], keys.shape[0]], tl.float32)) * scale
    return tl.where((rows >= 0)[None, :], logits, float("-inf"))


@triton.jit(do_not_specialize=["num_heads", "num_window", "num_pool", "tiles_per_split", "rope_dim"])
def _sparse_kernel(
    q_ptr,
    window,
    window_rows,
    pool,
    pool_rows,
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
    num_pool,
    tiles_per_split,
    rope_dim,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token, split = tl.program_id(0), tl.program_id(2)
    head, channel = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (head < num_heads)[:, None] & (channel < DIM)[None, :]
    place = (token.to(tl.int64) * num_heads + head)[:, None] * DIM + channel[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0)
    dtype: tl.constexpr = q.dtype

    window_tiles = tl.cdiv(num_window, BLOCK_K)
    first = split * tiles_per_split
    stop = tl.minimum(first + tiles_per_split, window_tiles + tl.cdiv(num_pool, BLOCK_K))
    peak = tl.zeros([BLOCK_H], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    passes = 0
    while passes < 2:
        sums = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        rows = _row_numbers(window_rows, pool_rows, token, first, window_tiles, num_window, num_pool, BLOCK_K)
        for tile in range(first, stop):
            keys = _keys(window, pool, rows, tile, window_tiles, DIM, BLOCK_D, dtype)
            ahead = _row_numbers(window_rows, pool_rows, token, tile + 1, window_tiles, num_window, num_pool, BLOCK_K)
            weights = tl.exp2(_logits(q, keys, rows, scale) - peak[:, None])
            sums += weights
            acc = dot(rounded(weights, dtype), keys, acc)
            rows = ahead
        total = tl.sum(sums, 1)
        passes += 1
        if passes == 1:
            if tl.max(((total >= LEAST) & (total <= MOST)).to(tl.int32) ^ 1, 0) == 0:
                passes = 2
            else:
                peak = tl.full([BLOCK_H], NO_KEY, tl.float32)
                for tile in range(first, stop):
                    rows = _row_numbers(window_rows, pool_rows, token, tile, window_tiles, num_window, num_pool, BLOCK_K)
                    keys = _keys(window, pool, rows, tile, window_tiles, DIM, BLOCK_D, dtype)
                    peak = tl.maximum(peak, tl.max(_logits(q, keys, rows, scale), 1))

    if partial_ptr is None:
        sink = tl.load(sink_ptr + head, mask=head < num_heads, other=0.0) * LOG2E
        heads = finish_row(acc, total, peak, sink, cos_ptr, sin_ptr, token, rope_dim, dtype, DIM)
        tl.store(out_ptr + place, heads, mask=inside)
    else:
        row = (split * tl.num_programs(0) + token).to(tl.int64) * num_heads + head
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
    """Add the partial sums of one token and `BLOCK_H` heads, split after split."""
    token = tl.program_id(0)
    head, channel = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    real = head < num_heads
    inside = real[:, None] & (channel < DIM)[None, :]
    peak = tl.full([BLOCK_H], NO_KEY, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in range(num_splits):
        row = (split * tl.num_programs(0) + token).to(tl.int64) * num_heads + head
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
    place = (token.to(tl.int64) * num_heads + head)[:, None] * DIM + channel[None, :]
    tl.store(out_ptr + place, heads, mask=inside)


def combine(
    partial: Tensor,
    total: Tensor,
    peak: Tensor,
    sink: Tensor,
    out: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Add partial sums over ranges of keys, in the order of the ranges; S splits.

    Args:
        partial: float32 `[S, T, H, D]`, sums of weighted keys.
        total: float32 `[S, T, H]`, sums of weights; 0 = no key.
        peak: float32 `[S, T, H]`, what the weights are relative to, in units of log2(e).
        sink: float32 `[H]`; -inf = none.
        out: `[T, H, D]`, overwritten.
        cos: float32 `[T, C]` to rotate the last 2C channels back by; None = leave them.
        sin: float32 `[T, C]`.

    Returns:
        `out`.
    """
    num_splits, num_tokens, num_heads, dim = partial.shape
    block_h = min(8, triton.next_power_of_2(num_heads))
    if num_tokens:
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
            0 if cos is None else 2 * cos.shape[1],
            DIM=dim,
            BLOCK_H=block_h,
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=4,
        )
    return out


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    pool: Tensor,
    pool_rows: Tensor,
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    num_splits: int = 1,
) -> Tensor:
    """Attend to listed rows; each row's keys are those of its two lists together. All tensors are contiguous.

    Args:
        q: `[T, H, D]`, bfloat16 or float32.
        window: `[Nw, D]` keys.
        window_rows: int32 `[T, W]`, row numbers in `window`; -1 = none.
        pool: `[Ng, D]` keys; may have more than 2^31 elements.
        pool_rows: int32 `[T, K]`, row numbers in `pool`; -1 = none; K may be 0.
        sink: float32 `[H]` logits, in the denominator only; None = none.
        scale: factor on the logits.
        out: `[T, H, D]` in q's dtype, overwritten. A row without keys is zero.
        cos: float32 `[T, C]` to rotate the last 2C channels back by (rounded before and after); None = leave them.
        sin: float32 `[T, C]`.
        num_splits: programs that share the keys of a row; more fill the chip when there are few rows.

    Returns:
        `out`. The same bits for the same arguments; other bits for another `num_splits`.
    """
    num_tokens, num_heads, dim = q.shape
    if not num_tokens:
        return out
    if sink is None:
        sink = q.new_full((num_heads,), -torch.inf, dtype=torch.float32)
    tile = head_tile(num_heads, dim, q.dtype)
    tiles = sum(triton.cdiv(rows.shape[1], tile["BLOCK_K"]) for rows in (window_rows, pool_rows))
    per_split = triton.cdiv(tiles, num_splits)
    num_splits = triton.cdiv(tiles, per_split)
    partial = total = peak = None
    if num_splits > 1:
        partial = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        total, peak = torch.empty(2, num_splits, num_tokens, num_heads, dtype=torch.float32, device=q.device)
    _sparse_kernel[num_tokens, triton.cdiv(num_heads, tile["BLOCK_H"]), num_splits](
        q,
        window,
        window_rows,
        pool,
        pool_rows,
        sink,
        cos,
        sin,
        out,
        partial,
        total,
        peak,
        scale * LOG2E,
        num_heads,
        window_rows.shape[1],
        pool_rows.shape[1],
        per_split,
        0 if cos is None else 2 * cos.shape[1],
        DIM=dim,
        **tile,
    )
    if partial is None or total is None or peak is None:
        return out
    return combine(partial, total, peak, sink, out, cos, sin)
