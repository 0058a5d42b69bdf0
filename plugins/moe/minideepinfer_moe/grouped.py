"""The routed experts' products on Hopper: bfloat16 or FP8 rows by packed MXFP4, many rows an expert or few.

Stands beside `experts` (see `products`) for bfloat16 and widths that are multiples of 128. Interpreted, a twin of
the kernel computes the same.

Measured on one H200 (2026-11-30, torch 2.11, Triton 3.6, L2 cold, cuBLAS bf16 8192^3 at 796 TFLOP/s in the same run),
96 of 384 experts, hidden 5120, inner 2304, gate_up + down, ms:

    24,632 rows (T = 16384): bfloat16 2.18 + 1.10 (another run 2.12 + 1.05), FP8 1.62 + 0.73; arithmetic alone 2.19
     6,132 rows (T = 4096):  bfloat16 0.89 + 0.46, FP8 0.62 + 0.35; arithmetic alone 0.55, weights alone 0.42

What binds is copying rows from L2 to shared memory: without copies gate_up takes 1.64 (bfloat16) and 1.10 (FP8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from minideepinfer.operators import MoeProblem, PackedExperts, interpreting
from torch import Tensor

from minideepinfer_moe.grouped_pack import STAGE_BYTES, GroupedExperts, GroupedMatrix, pack_grouped
from minideepinfer_moe.kernels.grouped_encode import encode_kernel, sort_rows_kernel
from minideepinfer_moe.kernels.grouped_twin import grouped_twin
from minideepinfer_moe.rows import quantize as quantize_rows
from minideepinfer_moe.schedule import Schedule


@dataclass(frozen=True)
class Shape:
    """How tiles are made.

    Attributes:
        tile_rows: most rows of a tile.
        box: rows that are copied at a time.
        tiles: which of the kernel's tile sizes are compiled, as bits.
        programs: on one multiprocessor.
        registers: of a thread, on average.
        stages: of bfloat16 and of FP8 rows that shared memory has room for.
    """

    tile_rows: int
    box: int
    tiles: int
    programs: int
    registers: int
    stages: tuple[int, int]


MANY = Shape(tile_rows=320, box=64, tiles=0b11111, programs=1, registers=168, stages=(5, 4))
FEW = Shape(tile_rows=96, box=32, tiles=0b11111000000, programs=1, registers=168, stages=(10, 8))
TINY = Shape(tile_rows=16, box=16, tiles=0b10000000000, programs=2, registers=80, stages=(14, 9))
SHAPES = {shape.tile_rows: shape for shape in (MANY, FEW, TINY)}
FEW_ROWS, TINY_ROWS = 80, 12
"""Rows an expert, on average, up to which a shape is best."""
ROW_PROGRAMS = 2048
"""Programs that pass over rows whose number only the device knows."""


def serves(problem: MoeProblem) -> bool:
    """Whether these products can serve a problem."""
    widths = problem.hidden_size, problem.intermediate_size
    chip = interpreting() or (problem.device == "cuda" and problem.capability == (9, 0))
    return chip and problem.dtype == "bfloat16" and all(width % 128 == 0 for width in widths)


class GroupedProducts:
    """See `products.Products`.

    Args:
        fp8: whether products are FP8; activations went through QDQ-FP8, then.
    """

    form = "triton, interpreted" if interpreting() else "gluon"

    def __init__(self, fp8: bool) -> None:
        self._fp8 = fp8

    def pack(self, experts: PackedExperts) -> GroupedExperts:
        """See `pack_grouped`."""
        return pack_grouped(experts, self._fp8)

    def tile_rows(self, max_rows: int, num_experts: int, dtype: torch.dtype) -> int:
        """320 rows for many rows an expert, 96 for few, 16 for very few."""
        average = max_rows / num_experts
        return (TINY if average <= TINY_ROWS else FEW if average <= FEW_ROWS else MANY).tile_rows

    def gate_up(
        self,
        x: Tensor,
        packed: GroupedExperts,
        schedule: Schedule,
        row_weights: Tensor,
        limit: float,
        quantize: bool,
    ) -> Tensor:
        """See `Products.gate_up`; FP8 leaves QDQ of the result to `down`."""
        r = x.new_empty(schedule.max_rows, packed.inner)
        if packed.fp8:
            rows, scales = _encode(x, schedule, sort=True)
        else:
            rows, scales = _sorted(x, schedule), row_weights
        _launch(rows, scales, packed.w13, schedule, r, row_weights, limit)
        return quantize_rows(r) if quantize and not packed.fp8 else r

    def down(self, r: Tensor, packed: GroupedExperts, schedule: Schedule) -> Tensor:
        """See `Products.down`."""
        y = r.new_empty(schedule.max_rows, packed.hidden)
        rows, scales = _encode(r, schedule, sort=False) if packed.fp8 else (r, schedule.row_weights)
        _launch(rows, scales, packed.w2, schedule, y, None, 0.0)
        return y


def _sorted(x: Tensor, schedule: Schedule) -> Tensor:
    """`[R, K]`, in expert order."""
    rows = x.new_empty(schedule.max_rows, x.shape[1])
    block = triton.next_power_of_2(x.shape[1])
    sort_rows_kernel[(min(len(rows), ROW_PROGRAMS),)](
        x, schedule.sorted_tokens, schedule.expert_offsets[-1:], rows, x.shape[1] // 32, BLOCK=block, num_warps=8
    )
    return rows


def _encode(x: Tensor, schedule: Schedule, sort: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[R, K]` and float32 `[R]` of rows in expert order; from token order if `sort`, else after QDQ."""
    codes, scales = (
        x.new_empty(schedule.max_rows, n, dtype=d) for n, d in ((x.shape[1], torch.uint8), (1, torch.float32))
    )
    block = triton.next_power_of_2(x.shape[1])
    encode_kernel[(min(len(codes), ROW_PROGRAMS),)](
        x, schedule.sorted_tokens, schedule.expert_offsets[-1:], codes, scales, x.shape[1] // 32,
        SORT=sort, QDQ=not sort, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return codes, scales


def _launch(
    x: Tensor,
    x_scales: Tensor,
    matrix: GroupedMatrix,
    schedule: Schedule,
    out: Tensor,
    row_weights: Tensor | None,
    limit: float,
) -> None:
    """Gate and up if there are `row_weights`, else down; FP8 if x is codes."""
    fp8, up = x.dtype is torch.uint8, row_weights is not None
    steps, blocks = x.shape[1] * x.element_size() // STAGE_BYTES, matrix.words.shape[1]
    others = x_scales if row_weights is None else row_weights, x_scales, matrix.row_scales, schedule.tiles
    if interpreting():
        grouped_twin[(blocks, schedule.max_tiles)](
            x,
            matrix.words,
            matrix.exponents,
            out,
            *others,
            limit,
            steps,
            blocks,
            *(x.shape[1], out.shape[1]),
            ROWS=triton.next_power_of_2(schedule.tile_rows),
            UP=up,
            FP8=fp8,
        )
        return
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from minideepinfer_moe.kernels.grouped import grouped_kernel  # Gluon is imported where it runs

    shape = SHAPES[schedule.tile_rows]
    parts = 2 if fp8 else 1
    plain = gl.NVMMASharedLayout(0, 32, 2)
    grouped_kernel[(torch.cuda.get_device_properties(x.device).multi_processor_count * shape.programs,)](
        TensorDescriptor.from_tensor(
            x.view(torch.float8_e4m3fn) if fp8 else x,
            [shape.box, 64 * parts],
            gl.NVMMASharedLayout(128, 16 // parts, 2),
        ),
        TensorDescriptor.from_tensor(matrix.words.view(-1, 256), [4 * parts, 256], plain),
        TensorDescriptor.from_tensor(
            matrix.exponents.flatten().view(torch.int32).view(-1, 64 * parts), [1, 64 * parts], plain
        ),
        out,
        *others,
        schedule.max_tiles,
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
