"""Grouped products with packed MXFP4 weights: plain Triton for every legal size and dtype.

One program computes one tile of rows of one expert times BLOCK_N outputs. Activations and packed weights come from
global memory through the pipeline's shared memory, are decoded in registers, and meet on tensor cores (bfloat16) or in
IEEE float32; sums stay in registers. Programs behind the last tile return at once.
"""

import triton
import triton.language as tl

from minideepinfer_moe.kernels.arithmetic import (
    INTERPRETED,
    clamped_swiglu,
    decode_mxfp4,
    narrow,
    qdq_fp8,
    rounded,
    widen,
)


@triton.jit
def _weights(packed_ptr, scale_ptr, rows, inside, k, groups, DTYPE: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Decoded `[N, K]` of some rows of a matrix from column k on; zeros outside."""
    halves, scales = k // 2 + tl.arange(0, K // 2), k // 32 + tl.arange(0, K // 32)
    packed = tl.load(
        packed_ptr + rows[:, None] * (groups * 16) + halves[None, :],
        mask=inside[:, None] & (halves < groups * 16)[None, :],
        other=0,
    )
    exponents = tl.load(
        scale_ptr + rows[:, None] * groups + scales[None, :],
        mask=inside[:, None] & (scales < groups)[None, :],
        other=127,
    )
    weights = decode_mxfp4(packed, exponents, N, K)
    return weights if INTERPRETED else weights.to(DTYPE)


@triton.jit(do_not_specialize=["hidden_groups", "inner_groups"])
def gate_up_kernel(
    x_ptr, w13_ptr, scale_ptr, tokens_ptr, weights_ptr, tiles_ptr, r_ptr, hidden_groups, inner_groups, limit,
    QUANTIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`r = silu(min(w1 x, limit)) * clamp(w3 x) * weight` for one tile; dims come in groups of 32."""
    tile = tiles_ptr + tl.program_id(1) * 3
    num_rows = tl.load(tile + 2)
    if num_rows > 0:
        expert, first = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        hidden, inner = hidden_groups * 32, inner_groups * 32
        rows = tl.arange(0, BLOCK_M)
        real = rows < num_rows
        x_rows = x_ptr + tl.load(tokens_ptr + first + rows, mask=real, other=0).to(tl.int64)[:, None] * hidden
        # Rows of w1 and w3 alternate, so that gate and up of an output end up in one thread.
        pairs = tl.program_id(0) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        matrix_rows, inside = pairs % 2 * inner + pairs // 2, pairs < 2 * inner
        w13_ptr += expert * inner * hidden
        scale_ptr += expert * inner * hidden_groups * 2
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        products = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in range(0, hidden, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + columns[None, :], mask=real[:, None] & (columns < hidden)[None, :], other=0.0)
            if INTERPRETED:
                x = widen(x)
            w13 = _weights(w13_ptr, scale_ptr, matrix_rows, inside, k, hidden_groups, dtype, 2 * BLOCK_N, BLOCK_K)
            products = tl.dot(x, w13.T, products, input_precision="ieee")
        gate, up = tl.split(tl.reshape(rounded(products, dtype), (BLOCK_M, BLOCK_N, 2)))
        weight = tl.load(weights_ptr + first + rows, mask=real, other=0.0)
        r = clamped_swiglu(gate, up, limit) * weight[:, None]
        if QUANTIZE:
            groups = tl.reshape(rounded(r, dtype), (BLOCK_M, BLOCK_N // 32, 32))
            r = tl.reshape(qdq_fp8(groups, 2), (BLOCK_M, BLOCK_N))
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = r_ptr + (first + rows).to(tl.int64)[:, None] * inner + outputs[None, :]
        tl.store(place, narrow(r, dtype), mask=real[:, None] & (outputs < inner)[None, :])


@triton.jit(do_not_specialize=["hidden_groups", "inner_groups"])
def down_kernel(
    r_ptr, w2_ptr, scale_ptr, tiles_ptr, y_ptr, hidden_groups, inner_groups,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`y = w2 r` for one tile."""
    tile = tiles_ptr + tl.program_id(1) * 3
    num_rows = tl.load(tile + 2)
    if num_rows > 0:
        expert, first = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        hidden, inner = hidden_groups * 32, inner_groups * 32
        rows = tl.arange(0, BLOCK_M)
        real = rows < num_rows
        numbers = (first + rows).to(tl.int64)[:, None]
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = outputs < hidden
        w2_ptr += expert * hidden * (inner // 2)
        scale_ptr += expert * hidden * inner_groups
        dtype: tl.constexpr = r_ptr.dtype.element_ty
        y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, inner, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            mask = real[:, None] & (columns < inner)[None, :]
            r = tl.load(r_ptr + numbers * inner + columns[None, :], mask=mask, other=0.0)
            if INTERPRETED:
                r = widen(r)
            w2 = _weights(w2_ptr, scale_ptr, outputs, inside, k, inner_groups, dtype, BLOCK_N, BLOCK_K)
            y = tl.dot(r, w2.T, y, input_precision="ieee")
        place = y_ptr + numbers * hidden + outputs[None, :]
        tl.store(place, narrow(y, dtype), mask=real[:, None] & inside[None, :])
