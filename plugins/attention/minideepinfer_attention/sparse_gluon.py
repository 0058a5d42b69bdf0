"""Host side of the Gluon kernels for attention on Hopper; what they compute is in `kernels.gluon`."""

from __future__ import annotations

from torch import Tensor

from minideepinfer_attention.kernels.gluon import sparse_prefill_kernel
from minideepinfer_attention.tiles import LOG2E, num_programs


def sparse_prefill(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    pool: Tensor,
    pool_rows: Tensor,
    sink: Tensor,
    scale: float,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """`sparse.sparse_attention` in bfloat16 of 64 heads x 512, 128 window rows and 64 rotated channels."""
    if len(q):
        programs = min(len(q), num_programs(q.device))  # shared memory holds one on a multiprocessor
        sparse_prefill_kernel[(programs,)](
            q,
            window,
            window_rows,
            pool,
            pool_rows,
            sink,
            cos,
            sin,
            out,
            len(q),
            pool_rows.shape[1],
            scale * LOG2E,
            num_warps=4,
        )
    return out
