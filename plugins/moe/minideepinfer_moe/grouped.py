"""The routed experts' products on Hopper: bfloat16 or FP8 activations by packed MXFP4, many rows an expert or few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minideepinfer_moe.grouped_pack import BLOCK, STAGE_BYTES, GroupedExperts, GroupedMatrix
from minideepinfer_moe.kernels.grouped import grouped_kernel
from minideepinfer_moe.schedule import Schedule


@dataclass(frozen=True)
class Shape:
    """How tiles are made.

    Attributes:
        tile_rows: most rows of a tile.
        max_rows: rows in shared memory.
        tiles: sizes compiled, a bit for each of the kernel's.
        programs: on one multiprocessor.
        registers: of a thread.
    """

    tile_rows: int
    max_rows: int
    tiles: int
    programs: int
    registers: int


MANY = Shape(tile_rows=320, max_rows=320, tiles=0b11111, programs=1, registers=255)
FEW = Shape(tile_rows=96, max_rows=128, tiles=0b111100000, programs=2, registers=128)


def shape_for(rows_per_expert: float) -> Shape:
    """MANY where one tile an expert is worth its registers, else FEW."""
    return FEW if rows_per_expert <= 80 else MANY


def _launch(
    x: Tensor,
    matrix: GroupedMatrix,
    schedule: Schedule,
    out: Tensor,
    row_weights: Tensor,
    x_scales: Tensor,
    limit: float,
    up: bool,
) -> None:
    fp8 = x.element_size() == 1
    shape = FEW if schedule.tile_rows == FEW.tile_rows else MANY
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    grouped_kernel[(sms * shape.programs,)](
        x,
        schedule.sorted_tokens,
        matrix.words,
        matrix.exponents.view(torch.int32),
        out,
        row_weights,
        x_scales,
        matrix.row_scales,
        schedule.tiles,
        schedule.max_tiles,
        limit,
        x.shape[1] * x.element_size() // STAGE_BYTES,
        matrix.words.shape[1],
        WIDTH=x.shape[1],
        OUT_WIDTH=out.shape[1],
        MAX_ROWS=shape.max_rows,
        TILES=shape.tiles,
        STAGES=4 if fp8 else 5,
        UP=up,
        FP8=fp8,
        num_warps=8,
        maxnreg=shape.registers,
    )
