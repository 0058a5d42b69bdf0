"""Rows in expert order for the grouped products: copied, or brought to e4m3 with one power of two a row for FP8.

A program owns row after row, which stay in registers; bound by memory. A value that went through QDQ-FP8 (spec 3.11) is
some group's scale times an e4m3 number; relative to the row's scale it stays exact down to 2^-6, and below that it is
off by at most 2^-10 (the row's largest value is above 224). Floor: the bytes of both. Measured for 24.6k rows on one
H200: sorting 5120 bfloat16 columns 0.131 ms (0.118 at copy rate), encoding 0.14 to 0.15 ms (0.07).
"""

import triton
import triton.language as tl
from minideepinfer.triton_casts import INTERPRETED, widen
from minideepinfer.triton_formats import qdq_fp8


@triton.jit(do_not_specialize=["groups"])
def sort_rows_kernel(
    x_ptr, tokens_ptr, num_rows_ptr, out_ptr, groups, HEAD: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """Row i of the result is row `tokens[i]` of x, for the first `num_rows[0]` rows of `32 groups`, HEAD + TAIL."""
    num_rows = tl.load(num_rows_ptr)
    width = (groups * 32).to(tl.int64)
    head, tail = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        source, target = x_ptr + tl.load(tokens_ptr + row) * width, out_ptr + row * width
        first, last = tl.load(source + head), tl.load(source + tail, mask=tail < width)
        tl.store(target + head, first)
        tl.store(target + tail, last, mask=tail < width)


@triton.jit
def _e4m3(x):
    """The nearest e4m3 number's byte, ties to even; NaN for what is not finite; at most 448 in magnitude."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if INTERPRETED:
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        small = ((tl.abs(x) + 16384.0) - 16384.0) * 512.0  # 2^14 leaves multiples of 2^-9
        codes = tl.where(magnitude < 121 << 23, small.to(tl.int32), normal) | ((bits >> 24) & 128)
        codes = codes.to(tl.uint8)
    else:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(magnitude < 0x7F800000, codes, 0x7F).to(tl.uint8)  # e4m3 has no infinity: NaN stands for it, too


@triton.jit(do_not_specialize=["groups"])
def encode_kernel(
    x_ptr, tokens_ptr, num_rows_ptr, codes_ptr, scales_ptr, groups,
    SORT: tl.constexpr, QDQ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `num_rows[0]` rows of `32 groups` to codes (bytes) and float32 scales; x is in token order if SORT."""
    num_rows = tl.load(num_rows_ptr)
    columns = tl.arange(0, BLOCK)[None, :]
    width = (groups * 32).to(tl.int64)
    inside = columns < width
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        source = tl.load(tokens_ptr + row) if SORT else row
        x = widen(tl.load(x_ptr + source * width + columns, mask=inside, other=0.0))
        if QDQ:
            x = tl.reshape(qdq_fp8(tl.reshape(x, (BLOCK // 32, 32)), 1), (1, BLOCK))
        amax = tl.maximum(tl.max(tl.abs(x)), 1e-4)
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 = 1.75 * 2^8
        x *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(codes_ptr + row * width + columns, _e4m3(x), mask=inside)
        tl.store(scales_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))
