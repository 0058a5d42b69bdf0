"""Passes over rows around the products: QDQ-FP8, the shared expert, combine."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from minideepinfer_moe.kernels.rows import combine_kernel, quantize_kernel, swiglu_kernel
from minideepinfer_moe.schedule import Schedule

BLOCK = 1024


def quantize(x: Tensor) -> Tensor:
    """QDQ-FP8 (spec 3.11) in x's dtype, groups of 32 along the last axis.

    Args:
        x: `[T, K]`, K a multiple of 32.
    """
    out = torch.empty_like(x)
    if x.numel():
        quantize_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
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
    swiglu_kernel[(tokens, triton.cdiv(inner, BLOCK))](h, r, inner // 32, limit, QUANTIZE=quantize, BLOCK=BLOCK)
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
    combine_kernel[(tokens, triton.cdiv(hidden, BLOCK))](
        y,
        schedule.slot_rows,
        out if shared is None else shared,
        out,
        topk,
        hidden // 32,
        SHARED=shared is not None,
        SLOTS=triton.next_power_of_2(topk),
        BLOCK=BLOCK,
    )
    return out
