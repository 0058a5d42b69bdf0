"""Passes over rows around the products: QDQ-FP8, the shared expert, combine."""

from __future__ import annotations

import torch
import triton
from minideepinfer.operators import interpreting
from torch import Tensor

from minideepinfer_moe.kernels.rows import combine_kernel, quantize_kernel, swiglu_kernel
from minideepinfer_moe.schedule import Schedule

COLUMNS = 1024
"""Columns of a token that `combine` adds up at a time."""
TOKENS, GROUPS = (8, 64) if interpreting() else (1, 32)
"""Tokens, or groups of 32 values, of a program; the interpreter's time goes by operations, not by elements."""


def quantize(x: Tensor) -> Tensor:
    """QDQ-FP8 (spec 3.11) in x's dtype, groups of 32 along the last axis.

    Args:
        x: `[T, K]`, K a multiple of 32.
    """
    out = torch.empty_like(x)
    groups = x.numel() // 32
    if groups:
        quantize_kernel[(triton.cdiv(groups, GROUPS),)](x, out, groups, GROUPS=GROUPS, num_warps=1)
    return out


def shared_expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize: bool) -> Tensor:
    """The expert every token visits: two dense products with the activation between them.

    Args:
        x: `[T, H]` compute dtype, T at least 1.
        w13: `[2 I, H]`, gate projection above up projection.
        w2: `[H, I]`.
        limit: clamp.
        quantize: whether the activation goes through QDQ-FP8; x already has, then.

    Returns:
        `[T, H]`.
    """
    h = torch.mm(x, w13.t())
    tokens, inner = len(x), w2.shape[1]
    r = x.new_empty(tokens, inner)
    groups = tokens * inner // 32
    swiglu_kernel[(triton.cdiv(groups, GROUPS),)](
        h, r, groups, inner // 32, limit, QUANTIZE=quantize, GROUPS=GROUPS, num_warps=1
    )
    return torch.mm(r, w2.t())


def combine(y: Tensor, schedule: Schedule, shared: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add up each token's local rows in slot order, then the shared expert's, in float32; round once.

    Args:
        y: `[R, H]`, by sorted row; only rows of `slot_rows` are read.
        schedule: the rows.
        shared: `[T, H]`, or None.
        dtype: of the result.

    Returns:
        `[T, H]`; zeros (or the shared expert alone) for a token without local rows.
    """
    tokens, topk = schedule.slot_rows.shape
    hidden = y.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=y.device)
    combine_kernel[(triton.cdiv(tokens, TOKENS),)](
        y,
        schedule.slot_rows,
        out if shared is None else shared,
        out,
        tokens,
        topk,
        hidden // 32,
        SHARED=shared is not None,
        TOKENS=TOKENS,
        SLOTS=triton.next_power_of_2(topk),
        PARTS=triton.cdiv(hidden, COLUMNS),
        BLOCK=COLUMNS,
    )
    return out
