"""The gate: float32 logits from one matrix product, selection in one kernel."""

from __future__ import annotations

import torch
import triton
from minideepinfer.operators import interpreting
from torch import Tensor

from minideepinfer_moe.kernels.gate import select_experts

TOKENS = 8 if interpreting() else 1
"""Tokens of a program; the interpreter's time goes by operations, not by elements."""


def gate_logits(x: Tensor, gate: Tensor) -> Tensor:
    """`x @ gate.T` in float32 on the stored weight.

    bfloat16 tokens go through tensor cores, where products of bfloat16 are exact and sums are float32; anything else is
    a float32 product.

    Args:
        x: `[T, H]` compute dtype.
        gate: `[num_experts, H]`; bfloat16, or float32 if x is.

    Returns:
        float32 `[T, num_experts]`.
    """
    if x.is_cuda and x.dtype is torch.bfloat16:
        return torch.mm(x, gate.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), gate.float().t())


def select(logits: Tensor, bias: Tensor, topk: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Choose and weigh experts, see `MoeOperator.route`.

    Args:
        logits: float32 `[T, num_experts]`.
        bias: float32 `[num_experts]`.
        topk: k.
        scaling: factor on the normalised weights.

    Returns:
        int32 ids and float32 weights, `[T, k]`, ids ascending; ids differ and are legal even if logits are NaN.
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, topk, dtype=torch.float32, device=logits.device)
    if tokens:
        select_experts[(triton.cdiv(tokens, TOKENS),)](
            logits,
            bias,
            ids,
            weights,
            tokens,
            experts,
            topk,
            scaling,
            TOKENS=TOKENS,
            EXPERTS=triton.next_power_of_2(max(experts, 16)),
            SLOTS=triton.next_power_of_2(topk),
            num_warps=1,
        )
    return ids, weights
