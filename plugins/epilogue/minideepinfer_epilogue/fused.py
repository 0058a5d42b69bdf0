"""`fused`: norm, rotation and rounding in one launch, Engram's gates in another.

What is only rotated and rounded has the bits of `naive`.
"""

from __future__ import annotations

import torch
import triton
from minideepinfer.operators import BuildContext, EpilogueProblem, Quantization, interpreting
from torch import Tensor

from minideepinfer_epilogue.kernels.engram import inject_rows
from minideepinfer_epilogue.kernels.rows import finish_rows
from minideepinfer_epilogue.plugin import WIDEST

GROUPS: dict[Quantization, int] = {"none": 1, "fp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Channels that share a scale."""
BLOCKS = (64, 128, 512, 2048, WIDEST)
"""Channels that a program may have of a row, the first one only where nothing but its end is rotated: few sizes, so
that few kernels are compiled."""
CHANNELS = 1024
"""Channels of a stream that `inject` has in registers at a time."""
NUMBERS = 1 << 16 if interpreting() else 2048
"""Numbers of a program; the interpreter's time goes by operations, not by elements."""


class FusedEpilogue:
    """See `EpilogueOperator`."""

    def __init__(self, problem: EpilogueProblem) -> None:
        self.form = "triton, interpreted" if interpreting() else "triton"
        self._eps = problem.rms_norm_eps

    def run(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        quantization: Quantization,
        in_place: bool,
    ) -> Tensor:
        """See `EpilogueOperator.run`."""
        out = x if in_place else torch.empty_like(x)
        if not x.numel():
            return out
        width, pairs, group = x.shape[-1], 0 if cos is None else cos.shape[-1], GROUPS[quantization]
        heads = x.shape[1] if x.dim() == 3 else 1
        tail = in_place and norm_weight is None and quantization == "none"
        if norm_weight is None and cos is None and quantization != "none":
            width = block = group  # nothing knows rows
        else:
            columns = 2 * pairs if tail else width
            block = next(size for size in (BLOCKS if tail else BLOCKS[1:]) if size >= columns)
        rows = max(1, NUMBERS // block)
        num_rows = x.numel() // width
        finish_rows[(triton.cdiv(num_rows, rows),)](
            x,
            out,
            norm_weight,
            cos,
            sin,
            num_rows,
            heads,
            width,
            pairs,
            self._eps,
            NORM=norm_weight is not None,
            ROTATE=cos is not None,
            TAIL=tail,
            FORMAT=quantization,
            GROUP=group,
            ALIGNED=width % 16 == 0 and pairs % 8 == 0,
            ROWS=rows,
            BD=block,
            num_warps=8 if block > 2048 else 4,
            enable_fp_fusion=False,  # the roundings of naive
        )
        return out

    def inject(self, streams: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        """See `EpilogueOperator.inject`."""
        out = torch.empty_like(streams)
        tokens, num_streams, width = streams.shape
        if tokens:
            inject_rows[(tokens * num_streams,)](
                streams,
                values,
                weight,
                out,
                num_streams,
                width,
                self._eps,
                width**-0.5,
                ALIGNED=width % 16 == 0,
                CHUNKS=triton.cdiv(width, CHANNELS),
                BH=CHANNELS,
                num_warps=4,
            )
        return out


def build(context: BuildContext) -> FusedEpilogue:
    """Build `fused`."""
    return FusedEpilogue(context.problem)
