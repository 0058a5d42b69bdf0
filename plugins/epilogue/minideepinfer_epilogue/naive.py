"""`naive`: the reference for what follows a dense product (spec 3.4, 3.9, 3.11)."""

from __future__ import annotations

import torch
from minideepinfer.model.linear import rms_norm
from minideepinfer.model.rope import apply_rope
from minideepinfer.operators import BuildContext, EpilogueProblem, Quantization
from minideepinfer.quantization import qdq_fp8, qdq_mxfp4, qdq_nvfp4
from torch import Tensor

ROUNDED = {"fp8": qdq_fp8, "mxfp4": qdq_mxfp4, "nvfp4": qdq_nvfp4}


class NaiveEpilogue:
    """See `EpilogueOperator`."""

    def __init__(self, problem: EpilogueProblem) -> None:
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
        y = x
        if norm_weight is not None:
            y = rms_norm(y, norm_weight, self._eps)
        if cos is not None and sin is not None:
            y = apply_rope(y, cos, sin)
        if quantization != "none":
            y = ROUNDED[quantization](y)
        return y.clone() if y is x and not in_place else y

    def inject(self, streams: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        """See `EpilogueOperator.inject`."""
        x, keys, value = streams.float(), values[:, :-1].float(), values[:, -1:].float()
        dot = (x * weight * keys).sum(-1)
        dot = dot * torch.rsqrt(x.square().mean(-1) + self._eps) * torch.rsqrt(keys.square().mean(-1) + self._eps)
        dot = dot * streams.shape[-1] ** -0.5
        root = dot.abs().clamp(min=1e-6).sqrt()
        gate = torch.sigmoid(torch.where(dot < 0, -root, root))
        return (x + gate.unsqueeze(-1) * value).to(streams.dtype)


def build(context: BuildContext) -> NaiveEpilogue:
    """Build `naive`."""
    return NaiveEpilogue(context.problem)
