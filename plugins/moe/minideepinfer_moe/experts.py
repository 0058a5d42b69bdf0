"""The routed experts' products over sorted rows, on weights that stay packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from minideepinfer.operators import PackedExperts, interpreting
from torch import Tensor

from minideepinfer_moe.kernels.experts import down_kernel, gate_up_kernel
from minideepinfer_moe.schedule import Schedule

GROUP = 32


@dataclass(frozen=True, eq=False)
class ReadyExperts:
    """`PackedExperts` of the same size, in the order that the kernels read.

    Of a group of 32 columns, byte j holds column j in its low and column 16 + j in its high nibble.

    Attributes:
        w13: uint8 `[E, 2, I, H / 2]`.
        w13_scale: uint8 `[E, 2, I, H / 32]`, as released.
        w2: uint8 `[E, H, I / 2]`.
        w2_scale: uint8 `[E, H, I / 32]`, as released.
        wide: whether any exponent is above 128.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    wide: bool


@dataclass(frozen=True)
class Tiling:
    """Sizes of a program: BLOCK_N outputs, BLOCK_K columns at a time, warps and pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int


def tile_rows(max_rows: int, num_experts: int, dtype: torch.dtype) -> int:
    """The tile height that suits about `max_rows / num_experts` rows an expert."""
    if interpreting():
        return 32
    average: int = triton.cdiv(max_rows, num_experts)
    if dtype is not torch.bfloat16:
        return 16
    return 8 if average <= 2 else 16 if average <= 12 else 64


def pack(experts: PackedExperts) -> ReadyExperts:
    """The form that the products read; called once, when weights are loaded."""
    scales = experts.w13_scale.contiguous(), experts.w2_scale.contiguous()
    wide = any(bool((scale > 128).any()) for scale in scales)
    return ReadyExperts(_halves(experts.w13), scales[0], _halves(experts.w2), scales[1], wide)


def _halves(released: Tensor) -> Tensor:
    """`[E, ..., K / 2]` -> the same bytes' worth with columns j and 16 + j of a group in one byte."""
    ready = torch.empty_like(released, memory_format=torch.contiguous_format)
    for expert, codes in zip(ready, released, strict=True):
        groups = codes.unflatten(-1, (-1, 2, GROUP // 4))  # bytes of the first and of the last 16 columns
        first, last = groups[..., 0, :], groups[..., 1, :]
        even, odd = (first & 15) | (last << 4), (first >> 4) | (last & 0xF0)
        expert.copy_(torch.stack((even, odd), dim=-1).flatten(-3))
    return ready


def gate_up(
    x: Tensor, packed: ReadyExperts, schedule: Schedule, row_weights: Tensor, limit: float, quantize: bool = False
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
    r = x.new_empty(schedule.max_rows, inner)
    tiling = _tiling(schedule.tile_rows, x.dtype, inner, hidden)
    hidden_unit, inner_unit = _unit(hidden), _unit(inner)
    gate_up_kernel[(triton.cdiv(inner, tiling.n) * schedule.max_tiles,)](
        x,
        packed.w13,
        packed.w13_scale,
        schedule.sorted_tokens,
        row_weights,
        schedule.tiles,
        r,
        hidden // GROUP // hidden_unit,
        inner // GROUP // inner_unit,
        limit,
        HIDDEN_UNIT=hidden_unit,
        INNER_UNIT=inner_unit,
        QUANTIZE=quantize,
        WIDE=packed.wide and x.dtype is torch.bfloat16,
        BLOCK_M=schedule.tile_rows,
        BLOCK_N=tiling.n,
        BLOCK_K=tiling.k,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return r


def down(r: Tensor, packed: ReadyExperts, schedule: Schedule) -> Tensor:
    """`y = w2 r`, summed in float32 and rounded to r's dtype.

    Args:
        r: `[R, I]`, from `gate_up`.
        packed: what `pack` returned.
        schedule: the rows.

    Returns:
        `[R, H]`; rows that do not exist are not written.
    """
    inner, hidden = r.shape[1], packed.w2.shape[1]
    y = r.new_empty(schedule.max_rows, hidden)
    tiling = _tiling(schedule.tile_rows, r.dtype, hidden, inner)
    hidden_unit, inner_unit = _unit(hidden), _unit(inner)
    down_kernel[(triton.cdiv(hidden, tiling.n) * schedule.max_tiles,)](
        r,
        packed.w2,
        packed.w2_scale,
        schedule.tiles,
        y,
        hidden // GROUP // hidden_unit,
        inner // GROUP // inner_unit,
        HIDDEN_UNIT=hidden_unit,
        INNER_UNIT=inner_unit,
        WIDE=packed.wide and r.dtype is torch.bfloat16,
        BLOCK_M=schedule.tile_rows,
        BLOCK_N=tiling.n,
        BLOCK_K=tiling.k,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return y


def _unit(width: int) -> int:
    """The power of two, 16 at most, that divides the groups of a row: what scales can be loaded by."""
    groups = width // GROUP
    return min(groups & -groups, 16)


def _tiling(rows: int, dtype: torch.dtype, outputs: int, columns: int) -> Tiling:
    """A tiling for a tile height.

    Two warps are too few for `wgmma`. With more, sums of Triton 3.6 came out wrong and changed from run to run. It is
    suspected, not shown, that one of the two products of an iteration is in flight while its left operand's registers
    are written again.
    """
    if interpreting():  # its time goes by operations, not by elements
        return Tiling(128 if outputs > 32 else 32, 128 if columns > 32 else 32, 2, 1)
    if dtype is not torch.bfloat16:
        return Tiling(32, 32, 4, 2)
    return Tiling(32, 256 if rows <= 16 and columns >= 1024 else 64, 2, 4)
