"""Host side of the Gluon kernels for attention on Hopper; what they compute is in `kernels.gluon`."""

from __future__ import annotations

import torch
from torch import Tensor

from minideepinfer_attention.kernels.gluon import sparse_prefill_kernel
from minideepinfer_attention.tiles import LOG2E


def sparse_prefill(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    pool: Tensor,
    pool_rows: Tensor,
    sink: Tensor | None,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Attend to listed rows; a token's keys are those of its two lists together. All tensors are contiguous.

    Args:
        q: bfloat16 `[T, 64, 512]`.
        window: bfloat16 `[Nw, 512]`.
        window_rows: int32 `[T, 128]`, row numbers in `window`; -1 = none, anywhere. Such a row is not read.
        pool: bfloat16 `[Ng, 512]`; may have more than 2^31 elements.
        pool_rows: int32 `[T, K]`, row numbers in `pool`; -1 = none.
        sink: float32 `[64]` logits, in the denominator only; None = none.
        scale: factor on the logits.
        cos: float32 `[T, 32]` to rotate the last 64 channels back by (rounded before and after); None = leave them.
        sin: float32 `[T, 32]`.
        out: bfloat16 `[T, 64, 512]`, overwritten. A token without keys is exactly zero.

    Returns:
        `out`. Deterministic; a token's bits depend on nothing but its own inputs.
    """
    if len(q):
        sparse_prefill_kernel[_grid(q)](
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


def _grid(q: Tensor) -> tuple[int]:
    """One program per multiprocessor: shared memory holds one."""
    return (min(len(q), torch.cuda.get_device_properties(q.device).multi_processor_count),)
