"""The coefficients of a site. N >= 2S + S^2 columns, a power of two.

`project`: a tile of BT rows x BK channels (all streams side by side) times `fn` on tensor cores; a weight is two
bfloat16 numbers in neighbouring columns. Channels are split among programs, each of which leaves its part of the N
products. `make_site` adds the parts in their order; a program has the S x S matrices of BT rows in registers through
all Sinkhorn iterations.

S = 4, H = 5120, T = 4096 in bfloat16 on one H200: both 0.059 ms, `make_site` by itself 0.009 (mostly its launch). The
streams read once at the copy rate take 0.039 ms, a torch reduction over them 0.055.
"""

from __future__ import annotations

import triton
import triton.language as tl
from minideepinfer.triton_casts import widen


@triton.jit(do_not_specialize=["num_tokens", "width", "tiles"])
def project(
    streams,  # [T, S * H]
    fn,  # [S * H, N * PARTS]
    partial,  # float32 [splits, T, N] out
    num_tokens,
    width,
    tiles,  # of a program
    ALIGNED: tl.constexpr,  # width is a multiple of 16
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    if ALIGNED:
        width = width // 16 * 16  # what the compiler then knows
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    split = tl.program_id(1)
    row_exists = rows < num_tokens
    columns = tl.arange(0, N * PARTS)
    end = tl.minimum((split + 1) * tiles * BK, width)
    acc = tl.zeros([BT, N * PARTS], tl.float32)
    for start in range(split * tiles * BK, end, BK):
        k = start + tl.arange(0, BK)
        exists = row_exists[:, None] & (k < end)[None, :]
        f = tl.load(fn + k.to(tl.int64)[:, None] * (N * PARTS) + columns[None, :], mask=(k < end)[:, None], other=0.0)
        tile = tl.load(streams + rows.to(tl.int64)[:, None] * width + k[None, :], mask=exists, other=0.0)
        # The tile has no other use: Triton 3.6 gives one of two uses a buffer too few, and products go wrong.
        acc = tl.dot(widen(tile) if f.dtype == tl.float32 else tile, f, acc, input_precision="ieee")
    if PARTS == 2:
        acc = tl.sum(tl.reshape(acc, [BT, N, PARTS]), 2)
    row = (split * num_tokens + rows).to(tl.int64)
    tl.store(partial + row[:, None] * N + tl.arange(0, N)[None, :], acc, mask=row_exists[:, None])


@triton.jit(do_not_specialize=["num_tokens", "width", "splits", "iterations"])
def make_site(
    partial,  # float32 [splits, T, N]
    squares,  # float32 [T]
    base,  # float32 [2S + S^2]
    scale,  # float32 [3]
    pre,  # float32 [T, S] out
    post,  # float32 [T, S] out
    comb,  # float32 [T, S, S] out
    num_tokens,
    width,
    splits,
    norm_eps,
    hc_eps,
    iterations,
    S: tl.constexpr,
    SP: tl.constexpr,  # S, up to a power of two
    N: tl.constexpr,
    SPLITS: tl.constexpr,  # most splits, a power of two
    BT: tl.constexpr,
):
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    parts = tl.arange(0, SPLITS)
    s = tl.arange(0, SP)
    row_exists = rows < num_tokens
    there = (parts < splits)[:, None] & row_exists[None, :]
    at = (parts[:, None] * num_tokens + rows[None, :]).to(tl.int64)
    rho = tl.rsqrt(tl.load(squares + rows, mask=row_exists, other=0.0) / width + norm_eps)

    real = s < S
    some = there[:, :, None] & real[None, None, :]
    exists = row_exists[:, None] & real[None, :]
    vector = at[:, :, None] * N + s[None, None, :]
    place = rows.to(tl.int64)[:, None] * S + s[None, :]
    logits = tl.sum(tl.load(partial + vector, mask=some, other=0.0), 0) * rho[:, None] * tl.load(scale)
    logits += tl.load(base + s, mask=real, other=0.0)[None, :]
    tl.store(pre + place, 1.0 / (1.0 + tl.exp(-logits)) + hc_eps, mask=exists)
    logits = tl.sum(tl.load(partial + S + vector, mask=some, other=0.0), 0) * rho[:, None] * tl.load(scale + 1)
    logits += tl.load(base + S + s, mask=real, other=0.0)[None, :]
    tl.store(post + place, 2.0 / (1.0 + tl.exp(-logits)), mask=exists)

    pair = s[:, None] * S + s[None, :]
    both = (real[:, None] & real[None, :])[None, :, :]
    matrix = at[:, :, None, None] * N + 2 * S + pair[None, None, :, :]
    some4 = there[:, :, None, None] & both[None, :, :, :]
    square = tl.sum(tl.load(partial + matrix, mask=some4, other=0.0), 0) * rho[:, None, None] * tl.load(scale + 2)
    square += tl.load(base + 2 * S + pair[None, :, :], mask=both, other=0.0)
    where = comb + (rows.to(tl.int64) * S * S)[:, None, None] + pair[None, :, :]
    tl.store(where, _sinkhorn(square, both, hc_eps, iterations), mask=row_exists[:, None, None] & both)


@triton.jit
def _sinkhorn(logits, real, eps, iterations):
    """`[rows, source, destination]`: softmax over destinations, then columns, rows, ..., columns."""
    logits = tl.where(real, logits, -3.0e38)
    c = tl.where(real, tl.exp(logits - tl.max(logits, 2)[:, :, None]), 0.0)
    c = tl.where(real, c / tl.where(real, tl.sum(c, 2)[:, :, None], 1.0) + eps, 0.0)
    c = c / tl.where(real, tl.sum(c, 1)[:, None, :] + eps, 1.0)
    for _ in range(1, iterations):
        c = c / tl.where(real, tl.sum(c, 2)[:, :, None] + eps, 1.0)
        c = c / tl.where(real, tl.sum(c, 1)[:, None, :] + eps, 1.0)
    return c
