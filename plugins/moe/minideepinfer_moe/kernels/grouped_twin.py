"""`grouped_kernel` in plain Triton, for the interpreter: same order of weights, same tiles, same sums.

One program computes the 128 outputs of one block for one tile of rows, a stage of columns at a time.
"""

import triton
import triton.language as tl
from minideepinfer.triton_casts import narrow, rounded, widen

from minideepinfer_moe.kernels.arithmetic import clamped_swiglu


@triton.jit
def _decode(words_ptr, exponents_ptr, stage, FP8: tl.constexpr):
    """Weights of a stage, float32 `[128, 64 or 128]`; for FP8 without the row's scale."""
    groups: tl.constexpr = 4 if FP8 else 2
    n = tl.arange(0, 128)[:, None]
    k = tl.arange(0, 32 * groups)[None, :]
    place = (n // 2 * 4 + (k // 4 % 4 if FP8 else k // 2 % 4)) * groups + k // 32
    word = tl.load(words_ptr + stage * (512 * groups) + place * 2 + n % 2)
    exponent = tl.load(exponents_ptr + stage * (128 * groups) + (n // 2 * groups + k // 32) * 2 + n % 2).to(tl.int32)
    if FP8:
        code = word >> (k // 16 % 2 * 16 + k % 4 * 4) & 7
        sign = word >> (k % 4 * 8 + tl.where(k // 16 % 2 == 1, 3, 7)) & 1
        scale = exponent // 8 + (127 - 5 + 63)
    else:
        half = word >> (k % 2 * 16)
        pair = k // 8 % 4
        code = tl.where(pair == 3, (half >> 10 & 3) * 2 + (half >> 13 & 1), half >> tl.maximum(6 - 3 * pair, 0) & 7)
        sign = half >> tl.where(pair == 3, 14, 15 - 3 * pair) & 1
        scale = exponent
    values = ((code << 22) | (sign << 31)).to(tl.float32, bitcast=True)
    if FP8:
        values *= 9.223372036854775808e18  # 2^63, the other half of 2^126
    return values * (scale << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decode_e4m3(codes):
    codes = codes.to(tl.int32)
    numbers = (((codes & 127) << 20) | ((codes & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((codes & 127) == 127, float("nan"), numbers)


@triton.jit(do_not_specialize=["steps", "blocks", "width", "out_width"])
def grouped_twin(
    x_ptr, words_ptr, exponents_ptr, out_ptr, row_weights_ptr, x_scales_ptr, w_scales_ptr, tiles_ptr,
    limit, steps, blocks, width, out_width, ROWS: tl.constexpr, UP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """See `grouped_kernel`; x is uint8 if FP8."""
    tile = tiles_ptr + tl.program_id(1) * 3
    num_rows = tl.load(tile + 2)
    if num_rows > 0:
        columns: tl.constexpr = 128 if FP8 else 64
        block = tl.load(tile) * blocks + tl.program_id(0)
        i = tl.arange(0, ROWS)
        present = i < num_rows
        rows = tl.load(tile + 1) + tl.minimum(i, num_rows - 1)
        source = x_ptr + rows.to(tl.int64)[None, :] * width + tl.arange(0, columns)[:, None]
        sums = tl.zeros((128, ROWS), tl.float32)
        for k in range(steps):
            weights = _decode(words_ptr, exponents_ptr, (block * steps + k).to(tl.int64), FP8)
            x = tl.load(source + k * columns)
            sums = tl.dot(weights, _decode_e4m3(x) if FP8 else widen(x), sums, input_precision="ieee")
        if FP8:
            sums *= tl.load(w_scales_ptr + block * 128 + tl.arange(0, 128))[:, None] * tl.load(x_scales_ptr + rows)
        if UP:
            gate, up = tl.split(tl.permute(tl.reshape(sums, (64, 2, ROWS)), (0, 2, 1)))
            dtype: tl.constexpr = out_ptr.dtype.element_ty
            routing = tl.load(row_weights_ptr + rows)[None, :]
            y = clamped_swiglu(rounded(gate, dtype), rounded(up, dtype), limit) * routing
            outputs = tl.program_id(0) * 64 + tl.arange(0, 64)
        else:
            y = sums
            outputs = tl.program_id(0) * 128 + tl.arange(0, 128)
        place = out_ptr + rows.to(tl.int64)[None, :] * out_width + outputs[:, None]
        tl.store(place, narrow(y, out_ptr.dtype.element_ty), mask=present[None, :])
