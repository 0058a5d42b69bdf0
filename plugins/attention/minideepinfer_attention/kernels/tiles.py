"""What the attention kernels share. Logits are kept in units of log2(e), so that a weight is one `exp2`."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from minideepinfer.triton_casts import INTERPRETED, narrow

LOG2E = tl.constexpr(math.log2(math.e))
NO_KEY = tl.constexpr(-1e30)
"""The maximum of no logits; finite, so that nothing is inf minus inf."""


@triton.jit
def unrotate(heads, cos, sin):
    """Rotate adjacent channels by the negative angle, in float32: heads `[M, N]`, cos and sin `[M or 1, N / 2]`.

    Where cos is 1 and sin 0, finite numbers stay as they are.
    """
    rows: tl.constexpr = heads.shape[0]
    half: tl.constexpr = heads.shape[1] // 2
    even, odd = tl.split(heads.to(tl.float32).reshape(rows, half, 2))
    return tl.join(even * cos + odd * sin, odd * cos - even * sin).reshape(rows, 2 * half)


@triton.jit
def divided(acc, total, peak, sink):
    """`acc` over the denominator with the sink in it: float32 `[M, N]`; zero in rows without keys, whose total is 0."""
    share = tl.where(total == 0, 0.0, 1.0 / (total + tl.exp2(sink - peak)))
    return acc * share[:, None]


@triton.jit
def finish_row(acc, total, peak, sink, cos_ptr, sin_ptr, token, rope_dim, dtype: tl.constexpr, DIM: tl.constexpr):
    """The heads of one token: divided, rounded, rotated back, rounded: `[M, N]`. `cos_ptr` None = not rotated."""
    heads = narrow(divided(acc, total, peak, sink), dtype)
    if cos_ptr is not None:
        pair = tl.arange(0, acc.shape[1] // 2) - (DIM - rope_dim) // 2
        rotates = (pair >= 0) & (2 * pair < rope_dim)
        angle = token * (rope_dim // 2) + pair
        cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0)[None, :]
        sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0)[None, :]
        heads = narrow(unrotate(heads, cos, sin), dtype)
    return heads


@triton.jit
def online_step(q, keys, valid, scale, peak, total, acc, num_heads, dtype: tl.constexpr):
    """Add one tile of keys to sums that are relative to a running maximum.

    Args:
        q: `[M, D]`.
        keys: `[N, D]`, zero where not valid; of q's dtype.
        valid: `[N]`.
        scale: factor on the logits, times log2(e).
        peak: float32 `[M]`, the maximum so far, finite.
        total: float32 `[M]`, sum of weights.
        acc: float32 `[M, D]`, sum of weighted keys.
        num_heads: any positive number that Triton does not know, see below.
        dtype: that weights are rounded to.

    Returns:
        The new peak, total and acc.
    """
    logits = tl.dot(q, keys.T, input_precision="ieee") * scale
    shrink = peak
    weights = tl.full(logits.shape, 0.0, dtype)
    # Always taken. Triton gives products that it sees to be chained one layout, in which two warpgroups would each
    # compute all of a 64-row product; it does not look through a branch.
    if num_heads > 0:
        logits = tl.where(valid[None, :], logits, float("-inf"))
        top = tl.maximum(peak, tl.max(logits, 1))
        exact = tl.exp2(logits - top[:, None])
        shrink = tl.exp2(peak - top)
        peak = top
        total = total * shrink + tl.sum(exact, 1)
        if INTERPRETED:
            exact = narrow(exact, dtype)
        weights = exact.to(dtype)
    acc = tl.dot(weights.to(q.dtype), keys, acc * shrink[:, None], input_precision="ieee")
    return peak, total, acc
