"""Grouped products for few rows an expert, where reading the packed weights once is the floor.

Weights are the left operand: one program computes BLOCK_N outputs of one expert for a tile of up to BLOCK_M rows.
Packed bytes stream through the pipeline's shared memory into registers and are decoded there, two bfloat16 to an
instruction; low and high nibbles stay separate tensors, so x is split into even and odd columns instead of the weights
being interleaved. Sums are float32 in registers.
"""

import triton
import triton.language as tl

from minideepinfer_moe.kernels.arithmetic import INTERPRETED, clamped_swiglu, narrow, qdq_fp8, rounded, widen

# Four bytes ($4) -> bfloat16 of their low nibbles ($0, $1) and of their high ones ($2, $3), times the scales ($5, $6).
# E2M1's sign goes to bit 15 and exponent and mantissa to bits 8..6; 2^126 (0x7E80) corrects the bias.
_DECODE = tl.constexpr("""{
.reg .b32 a, b, s, m, c;
mov.b32 c, 0x7E807E80;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 s, a, 12; shl.b32 m, a, 6; and.b32 s, s, 0x80008000; lop3.b32 $0, m, 0x01C001C0, s, 0xEA;
shl.b32 s, b, 12; shl.b32 m, b, 6; and.b32 s, s, 0x80008000; lop3.b32 $1, m, 0x01C001C0, s, 0xEA;
shl.b32 s, a, 8; shl.b32 m, a, 2; and.b32 s, s, 0x80008000; lop3.b32 $2, m, 0x01C001C0, s, 0xEA;
shl.b32 s, b, 8; shl.b32 m, b, 2; and.b32 s, s, 0x80008000; lop3.b32 $3, m, 0x01C001C0, s, 0xEA;
mul.bf16x2 $0, $0, c; mul.bf16x2 $1, $1, c; mul.bf16x2 $2, $2, c; mul.bf16x2 $3, $3, c;
mul.bf16x2 $0, $0, $5; mul.bf16x2 $1, $1, $6; mul.bf16x2 $2, $2, $5; mul.bf16x2 $3, $3, $6;
}""")


@triton.jit
def _decode_halves(packed, exponents, N: tl.constexpr, K: tl.constexpr):
    """Bytes `[N, K / 2]` and exponents `[N, K / 32]` -> even and odd columns, `[N, K / 2]` each, exact in bfloat16."""
    exponents = exponents.to(tl.int32)
    bits = tl.maximum(exponents << 7, 0x40) | (((exponents + 1) >> 2) & 0x40)
    scale = tl.broadcast_to(bits[:, :, None], (N, K // 32, 16)).reshape(N, K // 2)
    if INTERPRETED:
        codes = packed.to(tl.int32)
        scale = (scale << 16).to(tl.float32, bitcast=True)
        low = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        high = (((codes & 0x70) << 18) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        return low * scale, high * scale
    scale = scale.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.inline_asm_elementwise(
        _DECODE,
        "=r,=r,=r,=r,r,r,r",
        [packed, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _weights(packed_ptr, scale_ptr, outputs, inside, k, groups, N: tl.constexpr, K: tl.constexpr):
    """Even and odd columns of `[N, K]` from column k on; zeros outside."""
    halves, scales = k // 2 + tl.arange(0, K // 2), k // 32 + tl.arange(0, K // 32)
    packed = tl.load(
        packed_ptr + outputs[:, None] * (groups * 16) + halves[None, :],
        mask=inside[:, None] & (halves < groups * 16)[None, :],
        other=0,
    )
    exponents = tl.load(
        scale_ptr + outputs[:, None] * groups + scales[None, :],
        mask=inside[:, None] & (scales < groups)[None, :],
        other=127,
    )
    return _decode_halves(packed, exponents, N, K)


@triton.jit
def _columns(rows_ptr, real, k, width, M: tl.constexpr, K: tl.constexpr):
    """Even and odd columns from k on of M rows, transposed, `[K / 2, M]`; zeros outside."""
    columns = k + tl.arange(0, K)
    x = tl.load(rows_ptr + columns[None, :], mask=real[:, None] & (columns < width)[None, :], other=0.0)
    if INTERPRETED:
        x = widen(x)
    even, odd = tl.split(tl.reshape(x, (M, K // 2, 2)))
    return even.T, odd.T


@triton.jit(do_not_specialize=["hidden_units", "inner_units"])
def gate_up_kernel(
    x_ptr, w13_ptr, scale_ptr, tokens_ptr, weights_ptr, tiles_ptr, r_ptr, hidden_units, inner_units, limit,
    HIDDEN_UNIT: tl.constexpr, INNER_UNIT: tl.constexpr, QUANTIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`r = silu(min(w1 x, limit)) * clamp(w3 x) * weight` for one tile; dims are units * UNIT * 32."""
    tile = tiles_ptr + tl.program_id(1) * 3
    num_rows = tl.load(tile + 2)
    if num_rows > 0:
        expert, first = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        hidden_groups, inner_groups = hidden_units * HIDDEN_UNIT, inner_units * INNER_UNIT
        hidden, inner = hidden_groups * 32, inner_groups * 32
        rows = tl.arange(0, BLOCK_M)
        real = rows < num_rows
        x_rows = x_ptr + tl.load(tokens_ptr + first + rows, mask=real, other=0).to(tl.int64)[:, None] * hidden
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = outputs < inner
        w1_ptr, s1_ptr = w13_ptr + expert * inner * hidden, scale_ptr + expert * inner * hidden_groups * 2
        w3_ptr, s3_ptr = w1_ptr + inner * hidden // 2, s1_ptr + inner * hidden_groups
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, hidden, BLOCK_K):
            x_even, x_odd = _columns(x_rows, real, k, hidden, BLOCK_M, BLOCK_K)
            even, odd = _weights(w1_ptr, s1_ptr, outputs, inside, k, hidden_groups, BLOCK_N, BLOCK_K)
            gate = tl.dot(odd, x_odd, tl.dot(even, x_even, gate))
            even, odd = _weights(w3_ptr, s3_ptr, outputs, inside, k, hidden_groups, BLOCK_N, BLOCK_K)
            up = tl.dot(odd, x_odd, tl.dot(even, x_even, up))
        weight = tl.load(weights_ptr + first + rows, mask=real, other=0.0)
        r = (clamped_swiglu(rounded(gate, dtype), rounded(up, dtype), limit) * weight[None, :]).T
        if QUANTIZE:
            groups = tl.reshape(rounded(r, dtype), (BLOCK_M, BLOCK_N // 32, 32))
            r = tl.reshape(qdq_fp8(groups, 2), (BLOCK_M, BLOCK_N))
        place = r_ptr + (first + rows).to(tl.int64)[:, None] * inner + outputs[None, :]
        tl.store(place, narrow(r, dtype), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["hidden_units", "inner_units"])
def down_kernel(
    r_ptr, w2_ptr, scale_ptr, tiles_ptr, y_ptr, hidden_units, inner_units,
    HIDDEN_UNIT: tl.constexpr, INNER_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`y = w2 r` for one tile."""
    tile = tiles_ptr + tl.program_id(1) * 3
    num_rows = tl.load(tile + 2)
    if num_rows > 0:
        expert, first = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        hidden_groups, inner_groups = hidden_units * HIDDEN_UNIT, inner_units * INNER_UNIT
        hidden, inner = hidden_groups * 32, inner_groups * 32
        rows = tl.arange(0, BLOCK_M)
        real = rows < num_rows
        numbers = (first + rows).to(tl.int64)[:, None]
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = outputs < hidden
        w2_ptr += expert * hidden * (inner // 2)
        scale_ptr += expert * hidden * inner_groups
        y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, inner, BLOCK_K):
            r_even, r_odd = _columns(r_ptr + numbers * inner, real, k, inner, BLOCK_M, BLOCK_K)
            even, odd = _weights(w2_ptr, scale_ptr, outputs, inside, k, inner_groups, BLOCK_N, BLOCK_K)
            y = tl.dot(odd, r_odd, tl.dot(even, r_even, y))
        place = y_ptr + numbers * hidden + outputs[None, :]
        tl.store(place, narrow(y.T, y_ptr.dtype.element_ty), mask=real[:, None] & inside[None, :])
