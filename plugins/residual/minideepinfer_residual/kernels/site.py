"""The coefficients of a site. N >= 2S + S^2 columns, a power of two.

`project`: a tile of BT rows x BK channels (all streams side by side) times `fn` on tensor cores; a weight is two bfloat16
numbers in neighbouring columns. Channels are split among programs, each of which leaves its part of the N products and
of the sum of squares. `make_site` adds the parts in their order; a program has the S x S matrices of BT rows in
registers through all Sinkhorn iterations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minideepinfer_residual.kernels.casts import widen


@triton.jit
def project(
    streams,  # [T, S * H]
    fn,  # [S * H, N * PARTS]
    partial,  # float32 [splits, T, N] out
    squares,  # float32 [splits, T] out
    num_tokens,
    width,
    split_width,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    # The last rows first: the pass before wrote them last, and they may still lie in L2.
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BT + tl.arange(0, BT)
    split = tl.program_id(1)
    row_exists = rows < num_tokens
    columns = tl.arange(0, N * PARTS)
    end = tl.minimum((split + 1) * split_width, width)
    acc = tl.zeros([BT, N * PARTS], tl.float32)
    squared = tl.zeros([BT, BK // 8], tl.float32)
    for start in range(split * split_width, end, BK):
        k = start + tl.arange(0, BK)
        exists = row_exists[:, None] & (k < end)[None, :]
        f = tl.load(fn + k.to(tl.int64)[:, None] * (N * PARTS) + columns[None, :], mask=(k < end)[:, None], other=0.0)
        tile = tl.load(streams + rows.to(tl.int64)[:, None] * width + k[None, :], mask=exists, other=0.0)
        exact = widen(tile)
        acc = tl.dot(exact if f.dtype == tl.float32 else tile, f, acc, input_precision="ieee")
        squared += tl.sum(tl.reshape(exact * exact, [BT, BK // 8, 8]), 2)
    if PARTS == 2:
        acc = tl.sum(tl.reshape(acc, [BT, N, PARTS]), 2)
    row = (split * num_tokens + rows).to(tl.int64)
    tl.store(partial + row[:, None] * N + tl.arange(0, N)[None, :], acc, mask=row_exists[:, None])
    tl.store(squares + row, tl.sum(squared, 1), mask=row_exists)


@triton.jit
def make_site(
    partial,  # float32 [splits, T, N]
    squares,  # float32 [splits, T]
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
    SPLITS: tl.constexpr,  # splits, up to a power of two
    BT: tl.constexpr,
):
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    parts = tl.arange(0, SPLITS)
    s = tl.arange(0, SP)
    row_exists = rows < num_tokens
    there = (parts < splits)[:, None] & row_exists[None, :]
    at = (parts[:, None] * num_tokens + rows[None, :]).to(tl.int64)
    rho = tl.rsqrt(tl.sum(tl.load(squares + at, mask=there, other=0.0), 0) / width + norm_eps)

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
