"""The routed experts' products on Hopper: bfloat16 or FP8 rows by packed MXFP4, many rows an expert or few.

Stands beside `experts` (see `products`) for bfloat16 and widths that are multiples of 128. Interpreted, a twin of
the kernel computes the same.

Measured on one H200 (2026-11-30, torch 2.11, Triton 3.6, L2 cold, cuBLAS bf16 8192^3 at 770 TFLOP/s in the same run),
96 of 384 experts, hidden 5120, inner 2304, gate_up + down with sorting or encoding of rows, ms:

    24.6k rows (T = 16384): bfloat16 1.80 + 0.83, FP8 1.32 + 0.70; arithmetic alone 2.27 (bfloat16)
     6.1k rows (T = 4096):  bfloat16 0.75 + 0.36, FP8 0.52 + 0.29; weights alone 0.42
      768 rows (T = 512):   bfloat16 0.46 + 0.24, FP8 0.32 + 0.18; weights alone 0.42
"""

from __future__ import annotations

import torch
from minideepinfer.operators import MoeProblem, PackedExperts, interpreting
from torch import Tensor

from minideepinfer_moe.grouped_launch import launch, shape_for
from minideepinfer_moe.grouped_pack import GroupedExperts, pack_grouped
from minideepinfer_moe.grouped_rows import encode_rows, sort_rows
from minideepinfer_moe.rows import quantize as quantize_rows
from minideepinfer_moe.schedule import Schedule


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
        """See `grouped_launch.SHAPES`."""
        return shape_for(max_rows / num_experts).tile_rows

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
        rows, scales = encode_rows(x, schedule, sort=True) if packed.fp8 else (sort_rows(x, schedule), None)
        launch(rows, scales, packed.w13, schedule, r, row_weights, limit)
        return quantize_rows(r) if quantize and not packed.fp8 else r

    def down(self, r: Tensor, packed: GroupedExperts, schedule: Schedule) -> Tensor:
        """See `Products.down`."""
        y = r.new_empty(schedule.max_rows, packed.hidden)
        rows, scales = encode_rows(r, schedule, sort=False) if packed.fp8 else (r, None)
        return launch(rows, scales, packed.w2, schedule, y, None, 0.0)
