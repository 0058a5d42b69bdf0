"""The routed experts' products over sorted rows, on weights that stay packed."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from minideepinfer.operators import PackedExperts
from minideepinfer.operators.declaration import interpreting
from torch import Tensor

from minideepinfer_moe.kernels.experts import down_kernel, gate_up_kernel
from minideepinfer_moe.schedule import Schedule


def tile_rows(max_rows: int, num_experts: int, dtype: torch.dtype) -> int:
    """The tile height that suits about `max_rows / num_experts` rows an expert."""
    rows: int = triton.next_power_of_2(triton.cdiv(max_rows, num_experts))
    return min(max(rows, 16), 128 if dtype is torch.bfloat16 else 32)


def _block(width: int, dtype: torch.dtype) -> int:
    """Outputs, or columns, of a tile. float32 products keep both operands in registers."""
    if interpreting():  # its time goes by operations, not by elements
        return 128 if width > 32 else 32
    return 64 if dtype is torch.bfloat16 else 32


def pack(experts: PackedExperts) -> PackedExperts:
    """The form that the products read; called once, when weights are loaded."""
    return replace(
        experts,
        w13=experts.w13.contiguous(),
        w13_scale=experts.w13_scale.contiguous(),
        w2=experts.w2.contiguous(),
        w2_scale=experts.w2_scale.contiguous(),
    )


def gate_up(
    x: Tensor, packed: PackedExperts, schedule: Schedule, row_weights: Tensor, limit: float, quantize: bool = False
) -> Tensor:
    """`r = silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * weight`, in float32 on products in x's dtype.

    Args:
        x: `[T, H]` compute dtype; only rows that the schedule names are read.
        packed: what `pack` returned.
        schedule: the rows.
        row_weights: float32 `[R]`, by sorted row.
        limit: clamp of gate (above) and up (both sides).
        quantize: whether r goes through QDQ-FP8 after it was rounded; x already has, then.

    Returns:
        `[R, I]` in x's dtype; rows that do not exist are not written.
    """
    hidden, inner = x.shape[1], packed.w13.shape[2]
    block_n, block_k = _block(inner, x.dtype), _block(hidden, x.dtype)
    r = x.new_empty(schedule.max_rows, inner)
    grid = (triton.cdiv(inner, block_n), schedule.max_tiles)
    gate_up_kernel[grid](
        x,
        packed.w13,
        packed.w13_scale,
        schedule.sorted_tokens,
        row_weights,
        schedule.tiles,
        r,
        hidden // 32,
        inner // 32,
        limit,
        QUANTIZE=quantize,
        BLOCK_M=schedule.tile_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return r


def down(r: Tensor, packed: PackedExperts, schedule: Schedule) -> Tensor:
    """`y = w2 r`, summed in float32 and rounded to r's dtype.

    Args:
        r: `[R, I]`, from `gate_up`.
        packed: what `pack` returned.
        schedule: the rows.

    Returns:
        `[R, H]`; rows that do not exist are not written.
    """
    inner, hidden = r.shape[1], packed.w2.shape[1]
    block_n, block_k = _block(hidden, r.dtype), _block(inner, r.dtype)
    y = r.new_empty(schedule.max_rows, hidden)
    grid = (triton.cdiv(hidden, block_n), schedule.max_tiles)
    down_kernel[grid](
        r,
        packed.w2,
        packed.w2_scale,
        schedule.tiles,
        y,
        hidden // 32,
        inner // 32,
        BLOCK_M=schedule.tile_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return y
