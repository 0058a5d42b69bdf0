"""How far a correct residual operator may be from the truth: running error analysis of spec 3.2 and 3.3.

Truth and bounds are float64. An operator may sum in any order; a division, an inverse root and an exponential may each
be off by two units in the last place (4 · 2^-24), an exponential by its argument's rounding as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minideepinfer.operators import Coefficients, HyperConnectionWeights, ResidualProblem
from minideepinfer.testing.bounds import TINY
from minideepinfer.testing.recipes.residual import ResidualCase
from minideepinfer.testing.rounding import FLOAT32, UNIT, Approximate

ULPS = 4 * FLOAT32
"""Relative error of a division, an inverse root or an exponential."""
TWO_PARTS = 2.0**-16
"""Relative error of a weight that is held as the sum of two bfloat16 numbers."""
FLUSHED = 2.0**-126
"""Below it a device may flush a float32 number to zero."""


@dataclass(frozen=True, eq=False)
class Site:
    """Coefficients and their bounds.

    Attributes:
        pre: `[T, S]`.
        post: `[T, S]`.
        comb: `[T, S, S]`.
        spread: `[T, 1, 1]`, largest error of the logarithm of an entry of comb.
    """

    pre: Approximate
    post: Approximate
    comb: Approximate
    spread: Tensor


def mixed(streams: Tensor, output: Tensor, site: Coefficients, dtype: torch.dtype) -> Approximate:
    """The streams behind a sublayer, `[T, S, H]`: S + 1 products summed in float32, one rounding."""
    terms = streams.shape[1] + 1
    inflow, share = site.comb.double().mT, site.post.double().unsqueeze(-1)
    value = inflow @ streams.double() + share * output.double().unsqueeze(1)
    size = inflow.abs() @ streams.double().abs() + share.abs() * output.double().abs().unsqueeze(1)
    return _padded(Approximate(value, (terms + 1) * FLOAT32 * size).rounded(UNIT[dtype]))


def collapsed(streams: Tensor, pre: Tensor, norm_weight: Tensor | None, eps: float, dtype: torch.dtype) -> Approximate:
    """What enters a sublayer, `[T, H]`; `norm_weight` None = without the norm."""
    terms, weight = streams.shape[1], pre.double().unsqueeze(1)
    value = (weight @ streams.double())[:, 0]
    size = (weight.abs() @ streams.double().abs())[:, 0]
    u = Approximate(value, (terms + 1) * FLOAT32 * size + (terms + 1) * FLUSHED * (size > 0)).rounded(UNIT[dtype])
    return _padded(u if norm_weight is None else normalised(u, norm_weight.double(), eps).rounded(UNIT[dtype]))


def normalised(u: Approximate, weight: Tensor, eps: float) -> Approximate:
    """Between the inverse roots of the smallest and the largest mean square; no normalised number exceeds sqrt(H)."""
    hidden, magnitude = u.value.shape[-1], u.value.abs()
    means = (hidden + 3) * FLOAT32
    low = (magnitude - u.error).clamp(min=0.0).square().mean(-1, keepdim=True) * (1 - means)
    high = (magnitude + u.error).square().mean(-1, keepdim=True) * (1 + means)
    rho = (u.value.square().mean(-1, keepdim=True) + eps).rsqrt()
    most, least = (low + eps).rsqrt() * (1 + ULPS + FLOAT32), (high + eps).rsqrt() * (1 - ULPS - FLOAT32)
    error = u.error * most + magnitude * torch.maximum(most - rho, rho - least)
    error = error + 3 * FLOAT32 * (magnitude + u.error) * most
    error = error.minimum(hidden**0.5 * (1 + means + 2 * ULPS) + magnitude * rho)
    return Approximate(weight * u.value * rho, weight.abs() * error)


def site(streams: Tensor, weights: HyperConnectionWeights, problem: ResidualProblem, dtype: torch.dtype) -> Site:
    """The coefficients that `streams` give."""
    num_streams, eps = problem.num_streams, problem.hc_eps
    sizes = [num_streams, num_streams, num_streams * num_streams]
    pre, post, comb = (
        Approximate(*part)
        for part in zip(*(each.split(sizes, -1) for each in _logits(streams, weights, problem, dtype)), strict=True)
    )
    weighed, share = _sigmoid(pre), _sigmoid(post)
    square = Approximate(*(each.unflatten(-1, (num_streams, num_streams)) for each in (comb.value, comb.error)))
    matrix, spread = _sinkhorn(square, problem.sinkhorn_iterations, eps)
    return Site(
        pre=_padded(Approximate(weighed.value + eps, weighed.error).rounded(2 * FLOAT32)),
        post=_padded(Approximate(2 * share.value, 2 * share.error)),
        comb=_padded(matrix),
        spread=spread,
    )


def _logits(
    streams: Tensor, weights: HyperConnectionWeights, problem: ResidualProblem, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Affine logits `[T, 2S + S * S]` and their errors. What is zero takes part in no rounding."""
    flat, fn = streams.double().flatten(1), weights.fn.double()
    there = (flat != 0).double()
    terms = there @ (fn != 0).double().T
    size = flat.abs() @ fn.abs().T
    error = (terms + 1) * FLOAT32 * size
    if dtype is torch.bfloat16:
        error = (2 * terms + 1) * FLOAT32 * size * (1 + UNIT[dtype]) + TWO_PARTS * size
    rho = (flat.square().mean(-1, keepdim=True) + problem.rms_norm_eps).rsqrt()
    relative = (there.sum(-1, keepdim=True) + 3) / 2 * FLOAT32 + ULPS + FLOAT32
    m = flat @ fn.T * rho
    error = error * rho * (1 + relative) + m.abs() * relative
    repeats = torch.tensor([problem.num_streams, problem.num_streams, problem.num_streams**2])
    scale = weights.scale.double().repeat_interleave(repeats)
    affine = m * scale
    error = scale.abs() * error
    roundings = 3 * FLOAT32 * (weights.base.double().abs() + affine.abs() + error)
    return weights.base.double() + affine, error + roundings


def _sigmoid(x: Approximate) -> Approximate:
    """The steepest slope of the interval; relative errors of an exponential, a sum and a division."""
    value = x.value.sigmoid()
    nearest = (x.value.abs() - x.error).clamp(min=0.0).sigmoid()
    exponential = 2 * (x.value.abs() + x.error) * FLOAT32 + 2 * ULPS
    relative = exponential * (x.error - x.value).sigmoid() + 2 * ULPS
    error = nearest * (1 - nearest) * x.error + relative * (x.value + x.error).sigmoid()
    return Approximate(value, error.clamp(max=1.0))


def _sinkhorn(logits: Approximate, iterations: int, eps: float) -> tuple[Approximate, Tensor]:
    """Softmax and alternating division, with `spread`, a bound on the error of the logarithm of every entry.

    Write an operator's matrix as truth · exp(a_i + b_j + r_ij). A step that divides rows (columns) by their sums makes
    -a_i (-b_j) a logarithm of a mean of the exp(b_j + r_ij) and, with the weight of eps, of exp(-a_i): it stays
    between the smallest and the largest of the a_i and -b_j, but for the r_ij and the roundings of the sum. So that
    interval, empty at the start, grows in each step by twice these, and r_ij only by the rounding of a division.
    """
    value, error, num_streams = logits.value, logits.error, logits.value.shape[-1]
    comb = value.softmax(-1)
    distance = value.amax(-1, keepdim=True) - value + 2 * error.amax(-1, keepdim=True)
    off = error + 3 * distance * FLOAT32 + 2 * ULPS
    off = off + (comb * off.exp()).sum(-1, keepdim=True).log() + num_streams * FLOAT32 + ULPS
    relative = (comb * off.expm1() + TINY) / (comb + eps) + FLOAT32
    entry = torch.log1p(-relative.nan_to_num(nan=1.0).clamp(max=1.0)).neg().amax((-2, -1), keepdim=True)
    steps = 2 * iterations - 1
    interval = 2 * steps * (entry + (num_streams + 2) * FLOAT32) + ULPS * steps * (steps - 1)
    spread = interval + entry + ULPS * steps
    comb = comb + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return Approximate(comb, (comb * spread.expm1()).nan_to_num(nan=1.0).clamp(max=1.0)), spread


def _padded(number: Approximate) -> Approximate:
    return Approximate(number.value, number.error + TINY)


def truth(case: ResidualCase, dtype: torch.dtype, found: Mapping[str, Tensor]) -> dict[str, Approximate]:
    """What a call must return, and how far an operator that computes in a dtype may be off.

    Behind an advance, x and the coefficients follow from the streams that the operator itself returned.
    """
    known = {}
    streams, pre = case.streams, case.pre
    if case.call in ("mix", "advance"):
        known["streams"] = mixed(streams, case.output, case.site, dtype)
        streams, pre = found["streams"], case.site.pre
    if case.call != "mix":
        norm = None if case.call == "collapse" else case.norm_weight
        known["x"] = collapsed(streams, pre, norm, case.problem.rms_norm_eps, dtype)
    if case.call in ("enter", "advance"):
        entered = site(streams, case.weights, case.problem, dtype)
        known |= {name: getattr(entered, name) for name in ("pre", "post", "comb")}
    return known
