"""The routed experts' products on Hopper: bfloat16 or FP8 rows by packed MXFP4, many rows an expert or few.

Stands beside `experts` (see `fused.Products`) for bfloat16 and widths that are multiples of 128. Interpreted, a twin of
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
from minideepinfer.errors import OperatorError
from minideepinfer.operators import MoeProblem, PackedExperts, interpreting
from torch import Tensor

from minideepinfer_moe.grouped_pack import STAGE_BYTES, GroupedExperts, GroupedMatrix, fits, pack_grouped
from minideepinfer_moe.kernels.grouped_encode import encode_kernel
from minideepinfer_moe.kernels.grouped_twin import grouped_twin
from minideepinfer_moe.rows import quantize as quantize_rows
from minideepinfer_moe.schedule import Schedule


@dataclass(frozen=True)
class Shape:
    """How tiles are made.

    Attributes:
        tile_rows: most rows of a tile.
        max_rows: rows that shared memory has room for.
        tiles: which of the kernel's tile sizes are compiled, as bits.
        programs: on one multiprocessor.
        registers: of a thread, at most.
    """

    tile_rows: int
    max_rows: int
    tiles: int
    programs: int
    registers: int


MANY = Shape(tile_rows=320, max_rows=320, tiles=0b111111, programs=1, registers=255)
FEW = Shape(tile_rows=96, max_rows=128, tiles=0b11111000000, programs=2, registers=128)
FEW_ROWS = 80
"""Rows an expert, on average, up to which two narrow tiles at a time beat one wide one."""


def serves(problem: MoeProblem) -> bool:
    """Whether these products can serve a problem."""
    widths = problem.hidden_size, problem.intermediate_size
    chip = interpreting() or (problem.device == "cuda" and problem.capability == (9, 0))
    return chip and problem.dtype == "bfloat16" and all(width % 128 == 0 for width in widths)


class GroupedProducts:
    """See `fused.Products`.

    Args:
        fp8: whether activations are FP8, as released; products are, too, then, if the weights' exponents allow it.
    """

    def __init__(self, fp8: bool) -> None:
        self._fp8 = fp8

    def pack(self, experts: PackedExperts) -> GroupedExperts:
        """Reorder the weights, once.

        Raises:
            OperatorError: exponents are larger than the kernel decodes.
        """
        fp8 = self._fp8 and fits(experts, True)
        if not (fp8 or fits(experts, False)):
            raise OperatorError(
                "the grouped products of moe: fused were given experts with an exponent above 2^1, need at most 2^1; "
                "minideepinfer_moe.experts takes any"
            )
        return pack_grouped(experts, fp8)

    def tile_rows(self, max_rows: int, num_experts: int, dtype: torch.dtype) -> int:
        """96 rows for few rows an expert, 320 for many."""
        return (FEW if max_rows <= FEW_ROWS * num_experts else MANY).tile_rows

    def gate_up(
        self,
        x: Tensor,
        packed: GroupedExperts,
        schedule: Schedule,
        row_weights: Tensor,
        limit: float,
        quantize: bool = False,
    ) -> Tensor:
        """See `experts.gate_up`; FP8 leaves QDQ of the result to `down`."""
        r = x.new_empty(schedule.max_rows, packed.inner)
        if packed.fp8:
            everything = schedule.expert_offsets.new_full((1,), len(x))
            codes, scales = _encode(x, everything, qdq=False)
            _launch(codes, scales, packed.w13, schedule, r, row_weights, limit)
            return r
        _launch(x, row_weights, packed.w13, schedule, r, row_weights, limit)
        return quantize_rows(r) if quantize else r

    def down(self, r: Tensor, packed: GroupedExperts, schedule: Schedule) -> Tensor:
        """See `experts.down`."""
        y = r.new_empty(schedule.max_rows, packed.hidden)
        scales = schedule.row_weights
        if packed.fp8:
            r, scales = _encode(r, schedule.expert_offsets[-1:], qdq=True)
        _launch(r, scales, packed.w2, schedule, y, None, 0.0)
        return y


def _encode(x: Tensor, num_rows: Tensor, qdq: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[R, K]` and float32 `[R]` of the first `num_rows[0]` rows."""
    codes, scales = torch.empty_like(x, dtype=torch.uint8), x.new_empty(len(x), dtype=torch.float32)
    block = triton.next_power_of_2(x.shape[1])
    encode_kernel[(len(x),)](x, codes, scales, num_rows, x.shape[1] // 32, QDQ=qdq, BLOCK=block, num_warps=8)
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
    tensors = schedule.sorted_tokens, matrix.words, matrix.exponents
    others = x_scales if row_weights is None else row_weights, x_scales, matrix.row_scales, schedule.tiles
    if interpreting():
        grouped_twin[(blocks, schedule.max_tiles)](
            x,
            *tensors,
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
    from minideepinfer_moe.kernels.grouped import grouped_kernel  # Gluon is imported where it runs

    shape = FEW if schedule.tile_rows == FEW.tile_rows else MANY
    grouped_kernel[(torch.cuda.get_device_properties(x.device).multi_processor_count * shape.programs,)](
        x.view(torch.float8_e4m3fn) if fp8 else x,
        *tensors[:2],
        matrix.exponents.flatten().view(torch.int32),
        out,
        *others,
        schedule.max_tiles,
        limit,
        steps,
        blocks,
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
