"""Norm and products with the release's rounding: float32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.quantization import qdq_fp8


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise over the last axis in float32; an all-zero row gives zeros.

    Args:
        x: `[..., D]`.
        weight: `[D]`, any float dtype.
        eps: added to the mean square; 1e-20 in the release.

    Returns:
        Same shape and dtype as x.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed).to(x.dtype)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` as float32 numbers: products of bfloat16 numbers are exact in float32, and summed there.

    Args:
        x: `[T, K]`.
        weight: `[O, K]`, same dtype as x.

    Returns:
        float32 `[T, O]`.
    """
    if x.is_cuda and x.dtype is torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def quantized_linear(x: Tensor, weight: Tensor, activation_quantization: str) -> Tensor:
    """A product whose weight is stored in FP8 or FP4 and whose input may be quantised too (spec 2.3).

    Args:
        x: `[..., K]`, K a multiple of 32 if quantised.
        weight: `[O, K]`, decoded to x's dtype.
        activation_quantization: `released` = x goes through QDQ-FP8 first; `none` = as it is.

    Returns:
        `[..., O]`.
    """
    return F.linear(qdq_fp8(x) if activation_quantization == "released" else x, weight)
