"""Rows to e4m3 with one power of two a row, for FP8 products; bound by memory.

One program owns one row, which stays in registers. A value that went through QDQ-FP8 (spec 3.11) is some group's scale
times an e4m3 number; relative to the row's scale it stays exact down to 2^-6, and below that it is off by at most 2^-10
(the row's largest value is above 224). Floor: the bytes of x in bfloat16 and of its codes. Not measured.
"""

import triton
import triton.language as tl
from minideepinfer.triton_casts import widen
from minideepinfer.triton_formats import qdq_fp8


@triton.jit(do_not_specialize=["groups"])
def encode_kernel(x_ptr, codes_ptr, scales_ptr, num_rows_ptr, groups, QDQ: tl.constexpr, BLOCK: tl.constexpr):
    """Rows `[*, 32 groups]` to codes (bytes) and float32 scales; rows from `num_rows` on are left alone."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(num_rows_ptr):
        columns = tl.arange(0, BLOCK)[None, :]
        inside = columns < groups * 32
        x = widen(tl.load(x_ptr + row * groups * 32 + columns, mask=inside, other=0.0))
        if QDQ:
            x = tl.reshape(qdq_fp8(tl.reshape(x, (BLOCK // 32, 32)), 1), (1, BLOCK))
        amax = tl.maximum(tl.max(tl.abs(x)), 1e-4)
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 = 1.75 * 2^8
        x *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        small = ((tl.abs(x) + 16384.0) - 16384.0) * 512.0  # 2^14 leaves multiples of 2^-9
        codes = tl.where(magnitude < 121 << 23, small.to(tl.int32), normal) | ((bits >> 24) & 128)
        codes = tl.where(magnitude < 0x7F800000, codes, 0x7F)  # e4m3 has no infinity: NaN stands for it, too
        tl.store(codes_ptr + row * groups * 32 + columns, codes.to(tl.uint8), mask=inside)
        tl.store(scales_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))
