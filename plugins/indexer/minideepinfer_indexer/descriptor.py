"""Descriptors for the copy engine."""

from __future__ import annotations

from typing import Any

import torch
from minideepinfer.errors import OperatorError
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minideepinfer_indexer.operands import Operands
from minideepinfer_indexer.tiling import Tiling

ALIGNMENT = 16
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}


def describe(operands: Operands, tiling: Tiling) -> tuple[Any, Any]:
    """Queries in boxes of a tile's rows, keys in boxes of one page, at most one tile; 128 bytes of channels each.

    Raises:
        OperatorError: the copy engine cannot address the keys.
    """
    q, keys = operands.q, operands.keys
    if not keys.is_contiguous() or keys.data_ptr() % ALIGNMENT:
        raise OperatorError(
            f"indexer:fused has a key pool with strides {keys.stride()} at {keys.data_ptr():#x}; it needs a contiguous"
            f" one that starts at a multiple of {ALIGNMENT} bytes"
        )
    channels = slab(tiling, keys)
    queries = q if q.data_ptr() % ALIGNMENT == 0 else q.clone()
    return (
        _descriptor(queries, [tiling.rows, tiling.heads, channels]),
        _descriptor(keys.view(-1, keys.shape[2]), [min(keys.shape[1], tiling.entries), channels]),
    )


def slab(tiling: Tiling, keys: Tensor) -> int:
    """Channels of a box."""
    return min(tiling.dim, 128 // keys.element_size())


def _descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(box, _TYPES[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, box, layout)
