"""Kernels that pass over rows once: combine, the shared expert's activation, QDQ-FP8. All are bound by memory.

One program owns BLOCK columns of one row; a row's values meet in float32 registers in a fixed order, whatever else is
in the batch.
"""

import triton
import triton.language as tl

from minideepinfer_moe.kernels.arithmetic import clamped_swiglu, narrow, qdq_fp8, rounded, widen


@triton.jit(do_not_specialize=["topk", "hidden_groups"])
def combine_kernel(
    y_ptr, slot_rows_ptr, shared_ptr, out_ptr, topk, hidden_groups,
    SHARED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of a token's local rows, and of the shared expert's, rounded once; rows of other ranks are not read."""
    token = tl.program_id(0).to(tl.int64)
    hidden = hidden_groups * 32
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    slots = tl.arange(0, SLOTS)
    rows = tl.load(slot_rows_ptr + token * topk + slots, mask=slots < topk, other=-1)[:, None]
    mask = (rows >= 0) & inside[None, :]
    y = tl.load(y_ptr + rows.to(tl.int64) * hidden + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(widen(y), axis=0)
    if SHARED:
        total += widen(tl.load(shared_ptr + token * hidden + columns, mask=inside))
    tl.store(out_ptr + token * hidden + columns, narrow(total, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["inner_groups"])
def swiglu_kernel(h_ptr, r_ptr, inner_groups, limit, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`[T, 2, I]` products of w1 and w3 -> `[T, I]`, with QDQ-FP8 if QUANTIZE."""
    token = tl.program_id(0).to(tl.int64)
    inner = inner_groups * 32
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = columns < inner
    dtype: tl.constexpr = r_ptr.dtype.element_ty
    gate = tl.load(h_ptr + token * 2 * inner + columns, mask=inside, other=0.0)
    up = tl.load(h_ptr + token * 2 * inner + inner + columns, mask=inside, other=0.0)
    r = clamped_swiglu(widen(gate), widen(up), limit)
    if QUANTIZE:
        r = qdq_fp8(rounded(r, dtype), 1, BLOCK)
    tl.store(r_ptr + token * inner + columns, narrow(r, dtype), mask=inside)


@triton.jit(do_not_specialize=["size"])
def quantize_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """QDQ-FP8 of `size` values in groups of 32."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + places, mask=places < size, other=0.0)
    x = narrow(qdq_fp8(widen(x), 1, BLOCK), out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, x, mask=places < size)
