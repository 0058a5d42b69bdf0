"""Host side of the Gluon kernel for window-only attention on Hopper; what it computes is in `kernels.window_gluon`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minideepinfer_attention.kernels.gluon_common import HEADS
from minideepinfer_attention.kernels.window_gluon import CHUNK, EXTRA, TILE, WINDOW, window_prefill_kernel
from minideepinfer_attention.tiles import LOG2E, num_programs

if TYPE_CHECKING:
    from minideepinfer_attention.window import WindowTiles


def window_prefill(
    q: Tensor, buffer: Tensor, tiles: WindowTiles, sink: Tensor, scale: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """`window.window_attention` in bfloat16 of 64 heads x 512, windows of 128 and 64 rotated channels."""
    out, num_tiles = torch.empty_like(q), len(tiles.ranges)
    if num_tiles:
        programs = min(num_tiles, num_programs(q.device))  # shared memory holds one on a multiprocessor
        window_prefill_kernel[(programs,)](
            _boxes(q.flatten(0, 1), HEADS.value),
            _boxes(buffer, WINDOW.value),
            _boxes(buffer, EXTRA.value),
            _boxes(out.flatten(0, 1), HEADS.value),
            tiles.ranges,
            tiles.layout.first,
            tiles.layout.hidden,
            sink,
            cos,
            sin,
            scale * LOG2E,
            num_tiles,
            num_warps=4,
        )
    return out


def _boxes(rows: Tensor, height: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [height, CHUNK.value], TILE.value)
