"""Single-pass mHC: four residual streams and their mixing coefficients (spec 3.2, 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minideepinfer.config import TextConfig
from minideepinfer.model.weights import HyperConnectionWeights


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Mixing of one site, float32. `pre` is used at the *next* site, `post` and `comb` at this one.

    Attributes:
        pre: `[T, S]`.
        post: `[T, S]`.
        comb: `[T, S, S]`, first stream axis = source, second = destination.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


def coefficients(streams: Tensor, weights: HyperConnectionWeights, config: TextConfig) -> Coefficients:
    """Compute a site's coefficients from the streams that enter it.

    Args:
        streams: `[T, S, H]`.
        weights: the site's.
        config: for the epsilons and the iteration count.
    """
    num_streams = streams.shape[1]
    flat = streams.float().flatten(1)
    rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    projected = (flat @ weights.fn.T) * rho
    sizes = [num_streams, num_streams, num_streams * num_streams]
    scale = torch.repeat_interleave(weights.scale, torch.tensor(sizes, device=streams.device), output_size=sum(sizes))
    pre, post, comb = torch.addcmul(weights.base, projected, scale).split(sizes, dim=-1)
    return Coefficients(
        pre=torch.sigmoid(pre) + config.hc_eps,
        post=2 * torch.sigmoid(post),
        comb=sinkhorn(comb.unflatten(-1, (num_streams, num_streams)), config.hc_sinkhorn_iters, config.hc_eps),
    )


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Make `[T, S, S]` nearly doubly stochastic: rows first (the softmax), columns last."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """`[T, S, H]` weighted by `pre` `[T, S]` -> `[T, H]`, float32 sum, one rounding."""
    return torch.einsum("ts,tsh->th", pre, streams.float()).to(streams.dtype)


def mix(streams: Tensor, output: Tensor, site: Coefficients) -> Tensor:
    """The streams behind a sublayer: `X'[j] = post[j] y + sum_i comb[i, j] X[i]`, one rounding.

    Args:
        streams: `[T, S, H]` that entered the site.
        output: `[T, H]` of the sublayer.
        site: its coefficients.
    """
    mixed = torch.einsum("tij,tih->tjh", site.comb, streams.float())
    return (mixed + site.post.unsqueeze(-1) * output.float().unsqueeze(1)).to(streams.dtype)
