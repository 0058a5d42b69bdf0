"""The routed experts' products over sorted rows, on weights that stay packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from minideepinfer.operators import PackedExperts, interpreting
from torch import Tensor

from minideepinfer_moe.kernels.experts import experts_kernel
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
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


@dataclass(frozen=True)
class Tiling:
    """Sizes of a program: BLOCK_N outputs, BLOCK_K columns at a time, warps and pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int


class PlainProducts:
    """See `products.Products`; any legal size, dtype and exponents.

    Args:
        wide: whether any exponent of the weights is above 128.
    """

    form = "triton, interpreted" if interpreting() else "triton"

    def __init__(self, wide: bool) -> None:
        self._wide = wide

    def pack(self, experts: PackedExperts) -> ReadyExperts:
        """Columns j and 16 + j of a group into one byte."""
        scales = experts.w13_scale.contiguous(), experts.w2_scale.contiguous()
        return ReadyExperts(_halves(experts.w13), scales[0], _halves(experts.w2), scales[1])

    def tile_rows(self, max_rows: int, num_experts: int, dtype: torch.dtype) -> int:
        """8 to 64 rows."""
        if interpreting():
            return 32
        average: int = triton.cdiv(max_rows, num_experts)
        if dtype is not torch.bfloat16:
            return 16
        return 8 if average <= 2 else 16 if average <= 12 else 64

    def gate_up(
        self, x: Tensor, packed: ReadyExperts, schedule: Schedule, row_weights: Tensor, limit: float, quantize: bool
    ) -> Tensor:
        """See `Products.gate_up`."""
        r = x.new_empty(schedule.max_rows, packed.w13.shape[2])
        return self._launch(x, packed.w13, packed.w13_scale, schedule, r, row_weights, limit, quantize)

    def down(self, r: Tensor, packed: ReadyExperts, schedule: Schedule) -> Tensor:
        """See `Products.down`."""
        y = r.new_empty(schedule.max_rows, packed.w2.shape[1])
        return self._launch(r, packed.w2, packed.w2_scale, schedule, y)

    def _launch(
        self,
        x: Tensor,
        matrix: Tensor,
        scales: Tensor,
        schedule: Schedule,
        out: Tensor,
        row_weights: Tensor | None = None,
        limit: float = 0.0,
        quantize: bool = False,
    ) -> Tensor:
        """Gate and up if there are `row_weights`, else down."""
        columns, outputs = x.shape[1], out.shape[1]
        column_unit, output_unit = _unit(columns), _unit(outputs)
        tiling = _tiling(schedule.tile_rows, x.dtype, outputs, columns)
        experts_kernel[(triton.cdiv(outputs, tiling.n) * schedule.max_tiles,)](
            x,
            matrix,
            scales,
            schedule.sorted_tokens,
            schedule.row_weights if row_weights is None else row_weights,
            schedule.tiles,
            out,
            columns // GROUP // column_unit,
            outputs // GROUP // output_unit,
            limit,
            COLUMN_UNIT=column_unit,
            OUTPUT_UNIT=output_unit,
            UP=row_weights is not None,
            QUANTIZE=quantize,
            WIDE=self._wide and x.dtype is torch.bfloat16,
            BLOCK_M=schedule.tile_rows,
            BLOCK_N=tiling.n,
            BLOCK_K=tiling.k,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
        return out


def _halves(released: Tensor) -> Tensor:
    """`[E, ..., K / 2]` -> the same bytes' worth with columns j and 16 + j of a group in one byte."""
    ready = torch.empty_like(released, memory_format=torch.contiguous_format)
    for expert, codes in zip(ready, released, strict=True):
        groups = codes.unflatten(-1, (-1, 2, GROUP // 4))  # bytes of the first and of the last 16 columns
        first, last = groups[..., 0, :], groups[..., 1, :]
        even, odd = (first & 15) | (last << 4), (first >> 4) | (last & 0xF0)
        expert.copy_(torch.stack((even, odd), dim=-1).flatten(-3))
    return ready


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
