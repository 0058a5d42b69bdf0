"""Norm, rotation and rounding of rows in one pass.

A program has ROWS rows of at most BD channels in registers, reads them once and writes them once: all channels of a
row if there is a norm, the last ones alone (TAIL) if nothing else changes, or a group if there is only rounding. Pairs
of neighbours lie in one thread, a group in neighbouring lanes; programs share nothing. The floor is reading and writing
these channels.

T = 4096 in bfloat16, one H200 (floor at 4.27 TB/s): the last 64 of 512 channels of 64 heads 0.025 ms (0.016), 32 heads
of 128 to MXFP4 0.027 (0.016), rows of 5120 to FP8 0.027 (0.020), norm of 1280 channels 0.012 (0.005).
"""

from __future__ import annotations

import triton
import triton.language as tl
from minideepinfer.triton_casts import narrow, rounded, widen
from minideepinfer.triton_formats import qdq_fp8, qdq_mxfp4, qdq_nvfp4


@triton.jit(do_not_specialize=["num_rows", "heads", "width", "pairs"])
def finish_rows(
    x,  # [num_rows, width], `heads` rows for each token
    out,  # [num_rows, width], may be x
    norm_weight,  # float32 [width], or None
    cos,  # float32 [tokens, pairs], or None
    sin,  # float32 [tokens, pairs]
    num_rows,
    heads,
    width,
    pairs,
    eps,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    TAIL: tl.constexpr,  # the last 2 * pairs channels only
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,  # width and 2 * pairs are multiples of 16
    ROWS: tl.constexpr,
    BD: tl.constexpr,
):
    if ALIGNED:  # what the compiler then knows
        width = width // 16 * 16
        pairs = pairs // 8 * 8
    dtype = out.dtype.element_ty
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    start = width - 2 * pairs if TAIL else 0
    columns = start + tl.arange(0, BD)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows[:, None] * width + columns[None, :]
    y = widen(tl.load(x + places, mask=inside, other=0.0))
    if NORM:
        weight = tl.load(norm_weight + columns, mask=columns < width, other=0.0)
        rho = tl.rsqrt(tl.sum(y * y, 1) / width + eps)
        y = rounded(weight[None, :] * (y * rho[:, None]), dtype)
    if ROTATE:
        a, b = tl.split(tl.reshape(y, [ROWS, BD // 2, 2]))
        pair = tl.arange(0, BD // 2) + (0 if TAIL else pairs - width // 2)
        turns = (rows < num_rows)[:, None] & ((pair >= 0) & (pair < pairs))[None, :]
        angle = (rows // heads)[:, None] * pairs + pair[None, :]
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        first, second = rounded(a * c - b * s, dtype), rounded(a * s + b * c, dtype)
        y = tl.join(tl.where(turns, first, a), tl.where(turns, second, b))
        y = tl.reshape(y, [ROWS, BD])
    if FORMAT != "none":
        y = tl.reshape(y, [ROWS, BD // GROUP, GROUP])
        if FORMAT == "fp8":
            y = qdq_fp8(y, 2)
        elif FORMAT == "mxfp4":
            y = qdq_mxfp4(y, 2)
        else:
            y = qdq_nvfp4(y, 2)
        y = tl.reshape(y, [ROWS, BD])
    tl.store(out + places, narrow(y, dtype), mask=inside)
