"""`naive`: the reference for the residual streams of single-pass mHC (spec 3.2, 3.3)."""

from __future__ import annotations

import torch
from minideepinfer.model.linear import rms_norm
from minideepinfer.operators import BuildContext, Coefficients, Entered, HyperConnectionWeights, ResidualProblem
from torch import Tensor


class NaiveResidual:
    """See `ResidualOperator`."""

    def __init__(self, problem: ResidualProblem) -> None:
        self._problem = problem

    def transform_weights(self, weights: HyperConnectionWeights) -> HyperConnectionWeights:
        """Keep the weights as they are."""
        return weights

    def enter(self, streams: Tensor, pre: Tensor, weights: HyperConnectionWeights, norm_weight: Tensor) -> Entered:
        """See `ResidualOperator.enter`."""
        return Entered(streams, self.collapse(streams, pre, norm_weight), self._coefficients(streams, weights))

    def advance(
        self,
        streams: Tensor,
        output: Tensor,
        site: Coefficients,
        weights: HyperConnectionWeights,
        norm_weight: Tensor,
    ) -> Entered:
        """See `ResidualOperator.advance`."""
        return self.enter(self.mix(streams, output, site), site.pre, weights, norm_weight)

    def mix(self, streams: Tensor, output: Tensor, site: Coefficients) -> Tensor:
        """See `ResidualOperator.mix`."""
        mixed = torch.einsum("tij,tih->tjh", site.comb, streams.float())
        return (mixed + site.post.unsqueeze(-1) * output.float().unsqueeze(1)).to(streams.dtype)

    def collapse(self, streams: Tensor, pre: Tensor, norm_weight: Tensor | None) -> Tensor:
        """See `ResidualOperator.collapse`."""
        u = torch.einsum("ts,tsh->th", pre, streams.float()).to(streams.dtype)
        return u if norm_weight is None else rms_norm(u, norm_weight, self._problem.rms_norm_eps)

    def _coefficients(self, streams: Tensor, weights: HyperConnectionWeights) -> Coefficients:
        num_streams, eps = self._problem.num_streams, self._problem.hc_eps
        flat = streams.float().flatten(1)
        rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self._problem.rms_norm_eps)
        projected = (flat @ weights.fn.T) * rho
        sizes = [num_streams, num_streams, num_streams * num_streams]
        repeats = torch.tensor(sizes, device=streams.device)
        scale = torch.repeat_interleave(weights.scale, repeats, output_size=sum(sizes))
        pre, post, comb = torch.addcmul(weights.base, projected, scale).split(sizes, dim=-1)
        return Coefficients(
            pre=torch.sigmoid(pre) + eps,
            post=2 * torch.sigmoid(post),
            comb=sinkhorn(comb.unflatten(-1, (num_streams, num_streams)), self._problem.sinkhorn_iterations, eps),
        )


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Make `[T, S, S]` nearly doubly stochastic: rows first (the softmax), columns last."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def build(context: BuildContext) -> NaiveResidual:
    """Build `naive`."""
    return NaiveResidual(context.problem)
