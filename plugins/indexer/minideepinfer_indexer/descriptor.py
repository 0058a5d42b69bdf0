"""Descriptors for the copy engine."""

from __future__ import annotations

import torch
from minideepinfer.errors import OperatorError
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minideepinfer_indexer.tiling import Tiling

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}


def describe(keys: Tensor, tiling: Tiling) -> TensorDescriptor:
    """Keys `[num_pages, entries_per_page, d]` in boxes of one page, at most one tile, and of 128 bytes of channels.

    Raises:
        OperatorError: the copy engine cannot address them.
    """
    if not keys.is_contiguous() or keys.data_ptr() % 16:
        raise OperatorError(
            f"indexer:fused has a key pool with strides {keys.stride()} at {keys.data_ptr():#x}; it needs a contiguous"
            " one that starts at a multiple of 16 bytes"
        )
    box = [min(keys.shape[1], tiling.entries), min(tiling.dim, 128 // keys.element_size())]
    layout = gl.NVMMASharedLayout.get_default_for(box, _TYPES[keys.dtype])
    return TensorDescriptor.from_tensor(keys.view(-1, keys.shape[2]), box, layout)
