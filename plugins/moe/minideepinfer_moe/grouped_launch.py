"""How `grouped_kernel` is launched: tile shapes by the rows an expert has, descriptors for the copy engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from minideepinfer.operators import interpreting
from torch import Tensor

from minideepinfer_moe.grouped_pack import STAGE_BYTES, GroupedMatrix
from minideepinfer_moe.kernels.grouped_twin import grouped_twin
from minideepinfer_moe.schedule import Schedule


@dataclass(frozen=True)
class Shape:
    """How tiles are made.

    Attributes:
        average: rows an expert, up to which this shape is best.
        tile_rows: most rows of a tile.
        box: rows that are copied at a time.
        tiles: which of the kernel's tile sizes are compiled, as bits.
        programs: on one multiprocessor.
        registers: of a thread, on average over multiplying and copying warps.
        stages: of bfloat16 and of FP8 rows that shared memory has room for.
    """

    average: float
    tile_rows: int
    box: int
    tiles: int
    programs: int
    registers: int
    stages: tuple[int, int]


SHAPES = (
    Shape(average=11, tile_rows=16, box=16, tiles=0b100000000, programs=3, registers=56, stages=(10, 6)),
    Shape(average=44, tile_rows=64, box=32, tiles=0b111000000, programs=2, registers=80, stages=(8, 6)),
    Shape(average=144, tile_rows=96, box=32, tiles=0b001100000, programs=2, registers=80, stages=(6, 5)),
    Shape(average=float("inf"), tile_rows=320, box=64, tiles=0b000011111, programs=1, registers=168, stages=(5, 4)),
)


def shape_for(average: float) -> Shape:
    """The shape for `average` rows an expert."""
    return next(shape for shape in SHAPES if average <= shape.average)


def launch(
    x: Tensor,
    x_scales: Tensor | None,
    matrix: GroupedMatrix,
    schedule: Schedule,
    out: Tensor,
    row_weights: Tensor | None,
    limit: float,
) -> Tensor:
    """Multiply rows in expert order with one matrix of each expert.

    Args:
        x: `[R, K]` bfloat16, or uint8 with e4m3 codes.
        x_scales: float32 `[R]`, what a row of codes is to be multiplied by; None for bfloat16.
        matrix: w13 or w2, packed for x's dtype.
        schedule: the rows.
        out: bfloat16 `[R, I]` or `[R, H]`, rows that do not exist are not written.
        row_weights: float32 `[R]` with w13, whose outputs go through SwiGLU; None with w2.
        limit: clamp of gate and up.

    Returns:
        out.
    """
    fp8, up = x_scales is not None, row_weights is not None
    steps, blocks = x.shape[1] * x.element_size() // STAGE_BYTES, matrix.words.shape[1]
    unread = schedule.row_weights
    tensors = (
        out,
        unread if row_weights is None else row_weights,
        unread if x_scales is None else x_scales,
        matrix.row_scales,
        schedule.tiles,
    )
    if interpreting():
        rows = triton.next_power_of_2(schedule.tile_rows)
        grouped_twin[(blocks, schedule.max_tiles)](
            x, matrix.words, matrix.exponents, *tensors, limit, steps, blocks, x.shape[1], out.shape[1], rows, up, fp8
        )
        return out
    from minideepinfer_moe.kernels.grouped import grouped_kernel  # Gluon is imported where it runs

    shape = next(shape for shape in SHAPES if shape.tile_rows == schedule.tile_rows)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    grouped_kernel[(processors * shape.programs,)](
        _boxes_of_rows(x, shape.box),
        *matrix.boxes,
        *tensors,
        schedule.num_tiles,
        limit,
        steps,
        blocks,
        OUT_WIDTH=out.shape[1],
        ROWS=shape.tile_rows,
        BOX=shape.box,
        TILES=shape.tiles,
        STAGES=shape.stages[fp8],
        UP=up,
        FP8=fp8,
        num_warps=8,
        maxnreg=shape.registers,
    )
    return out


def _boxes_of_rows(x: Tensor, box: int) -> Any:
    """Descriptor of `box` rows and 128 bytes at a time, swizzled as `wgmma` reads them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if x.dtype is torch.uint8:
        return TensorDescriptor.from_tensor(x.view(torch.float8_e4m3fn), [box, 128], gl.NVMMASharedLayout(128, 8, 2))
    return TensorDescriptor.from_tensor(x, [box, 64], gl.NVMMASharedLayout(128, 16, 2))
