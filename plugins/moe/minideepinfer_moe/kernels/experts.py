"""Grouped products with packed MXFP4 weights: plain Triton for every legal size, dtype and number of rows.

Weights are the left operand: one program computes BLOCK_N outputs of one expert for a tile of up to BLOCK_M rows.
Packed bytes stream through the pipeline's shared memory into registers and are decoded there, two bfloat16 to an
instruction. The first and the last 16 columns of a group of 32 share bytes (see `experts.pack`) and stay two operands,
each with its half of x, so that nothing is shuffled. Sums are float32 in registers; float32 operands are multiplied in
IEEE float32. Programs behind the last tile return at once.

Floor: packed weights of the experts touched / 4.28 TB/s. Measured on one H200 (96 of 384 experts local, 5120 x 2304,
both products): 0.42 ms for 58 experts and 64 tokens, floor 0.26; 0.094 for 10 and 8, floor 0.044.
"""

import triton
import triton.language as tl
from minideepinfer.triton_casts import INTERPRETED, narrow, rounded, widen
from minideepinfer.triton_formats import qdq_fp8

from minideepinfer_moe.kernels.arithmetic import clamped_swiglu

# Four bytes ($4) -> bfloat16 of their low nibbles ($0, $1) and of their high ones ($2, $3), times the scales ($5, $6).
# E2M1's sign goes to bit 15 and exponent and mantissa to bits 8..6, which is the value times 2^-126.
_PLACE = """{
.reg .b32 a, b, s, m, c;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 s, a, 12; shl.b32 m, a, 6; and.b32 s, s, 0x80008000; lop3.b32 $0, m, 0x01C001C0, s, 0xEA;
shl.b32 s, b, 12; shl.b32 m, b, 6; and.b32 s, s, 0x80008000; lop3.b32 $1, m, 0x01C001C0, s, 0xEA;
shl.b32 s, a, 8; shl.b32 m, a, 2; and.b32 s, s, 0x80008000; lop3.b32 $2, m, 0x01C001C0, s, 0xEA;
shl.b32 s, b, 8; shl.b32 m, b, 2; and.b32 s, s, 0x80008000; lop3.b32 $3, m, 0x01C001C0, s, 0xEA;
"""
_BIAS = """mov.b32 c, 0x7E807E80;
mul.bf16x2 $0, $0, c; mul.bf16x2 $1, $1, c; mul.bf16x2 $2, $2, c; mul.bf16x2 $3, $3, c;
"""
_SCALE = """mul.bf16x2 $0, $0, $5; mul.bf16x2 $1, $1, $6; mul.bf16x2 $2, $2, $5; mul.bf16x2 $3, $3, $6;
}"""
_DECODE = tl.constexpr(_PLACE + _SCALE)
_DECODE_WIDE = tl.constexpr(_PLACE + _BIAS + _SCALE)


@triton.jit
def decode_halves(packed, exponents, DTYPE: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Bytes `[N, K / 2]` and E8M0 exponents `[N, K / 32]` -> values of low and of high nibbles, `[N, K / 2]` each.

    Exact in bfloat16 (spec 2.2); exponent 0 is the subnormal 2^-127, 255 is NaN. Unless an exponent may be WIDE, above
    128, a scale can take in the 2^126 that corrects E2M1's bias, and 0 and 255 need no care.
    """
    exponents = exponents.to(tl.int32)
    if INTERPRETED or tl.float32 == DTYPE:
        bits = tl.maximum(exponents << 23, 1 << 22) | (((exponents + 1) << 14) & (1 << 22))
        scale = tl.broadcast_to(bits.to(tl.float32, bitcast=True)[:, :, None], (N, K // 32, 16)).reshape(N, K // 2)
        codes = packed.to(tl.int32)
        low = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)
        high = (((codes & 0x70) << 18) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)
        halves = low * 8.507059173023462e37 * scale, high * 8.507059173023462e37 * scale
    else:
        exact = tl.maximum(exponents << 7, 0x40) | (((exponents + 1) >> 2) & 0x40)
        bits = exact if WIDE else (exponents + 126) << 7
        scale = tl.broadcast_to(bits[:, :, None], (N, K // 32, 16)).reshape(N, K // 2)
        halves = tl.inline_asm_elementwise(
            _DECODE_WIDE if WIDE else _DECODE,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, scale.to(tl.int16).to(tl.bfloat16, bitcast=True)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return halves


@triton.jit
def _multiply(
    total, x_ptr, real, packed_ptr, scale_ptr, rows, inside, groups,
    WIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Add `rows` of a packed matrix times x, `[N, M]`, over all columns; `x_ptr` points at the beginnings of M rows."""
    lanes, scales = tl.arange(0, K // 2), tl.arange(0, K // 32)
    packed_ptr += (rows * (groups * 16))[:, None]
    scale_ptr += (rows * groups)[:, None]
    x_ptr += (lanes // 16 * 32 + lanes % 16)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for group in range(0, groups, K // 32):
        there, scale_there = lanes < (groups - group) * 16, scales < groups - group
        packed = tl.load(packed_ptr + lanes[None, :], mask=inside[:, None] & there[None, :], other=0)
        exponents = tl.load(scale_ptr + scales[None, :], mask=inside[:, None] & scale_there[None, :], other=127)
        low, high = decode_halves(packed, exponents, dtype, WIDE, N, K)
        x_low = tl.load(x_ptr, mask=there[:, None] & real[None, :], other=0.0)
        x_high = tl.load(x_ptr + 16, mask=there[:, None] & real[None, :], other=0.0)
        if INTERPRETED and tl.bfloat16 == dtype:
            x_low, x_high = widen(x_low), widen(x_high)
        total = tl.dot(low, x_low, total, input_precision="ieee")
        total = tl.dot(high, x_high, total, input_precision="ieee")
        packed_ptr += K // 2
        scale_ptr += K // 32
        x_ptr += K
    return total


@triton.jit(do_not_specialize=["column_units", "output_units"])
def experts_kernel(
    x_ptr, packed_ptr, scale_ptr, tokens_ptr, weights_ptr, tiles_ptr, out_ptr, column_units, output_units, limit,
    COLUMN_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr, UP: tl.constexpr, QUANTIZE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of `[*, columns]` rows to `[R, outputs]`; dims are units * UNIT * 32.

    UP: rows are named by `tokens`, the matrix is w1 above w3, outputs are `silu(min(w1 x, limit)) * clamp(w3 x) *
    weight`, which go through QDQ-FP8 if QUANTIZE. Else rows are sorted already, and outputs are the products.
    """
    groups, outputs = column_units * COLUMN_UNIT, output_units * OUTPUT_UNIT * 32
    blocks = (outputs + BLOCK_N - 1) // BLOCK_N
    tile, first_output = tiles_ptr + tl.program_id(0) // blocks * 3, tl.program_id(0) % blocks * BLOCK_N
    num_rows = tl.load(tile + 2)
    if num_rows > 0:
        matrices: tl.constexpr = 2 if UP else 1
        expert, first = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        rows = tl.arange(0, BLOCK_M)
        real, numbers = rows < num_rows, (first + rows).to(tl.int64)
        sources = tl.load(tokens_ptr + numbers, mask=real, other=0).to(tl.int64) if UP else numbers
        # Eight rows of w1 and eight of w3 alternate, so that gate and up of an output end up in one thread.
        lanes = tl.arange(0, matrices * BLOCK_N)
        matrix_rows = first_output + (lanes // 16 * 8 + lanes % 8 if UP else lanes)
        inside = matrix_rows < outputs
        if UP:
            matrix_rows += lanes // 8 % 2 * outputs
        packed_ptr += expert * outputs * (groups * 16 * matrices)
        scale_ptr += expert * outputs * (groups * matrices)
        products = tl.full((matrices * BLOCK_N, BLOCK_M), 0.0, tl.float32)
        products = _multiply(
            products, x_ptr + sources[None, :] * (groups * 32), real, packed_ptr, scale_ptr, matrix_rows, inside,
            groups, WIDE, matrices * BLOCK_N, BLOCK_K,
        )  # fmt: skip
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        if UP:
            pairs = tl.reshape(rounded(products, dtype), (BLOCK_N // 8, 2, 8, BLOCK_M))
            gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
            weight = tl.load(weights_ptr + numbers, mask=real, other=0.0)
            y = tl.reshape(clamped_swiglu(gate, up, limit), (BLOCK_N, BLOCK_M)) * weight[None, :]
            if QUANTIZE:
                grouped = tl.reshape(rounded(y, dtype), (BLOCK_N // 32, 32, BLOCK_M))
                y = tl.reshape(qdq_fp8(grouped, 1), (BLOCK_N, BLOCK_M))
        else:
            y = products
        targets = first_output + tl.arange(0, BLOCK_N)
        place = out_ptr + numbers[None, :] * outputs + targets[:, None]
        tl.store(place, narrow(y, dtype), mask=real[None, :] & (targets < outputs)[:, None])
