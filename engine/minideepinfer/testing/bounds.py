"""How far a correct operator may be from the truth; `docs/conformance.md` has the derivations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minideepinfer.quantization import decode_mxfp4
from minideepinfer.testing.recipes.attention import AttentionCase
from minideepinfer.testing.recipes.indexer import IndexerCase
from minideepinfer.testing.recipes.moe import MoeCase
from minideepinfer.testing.rounding import FLOAT32, UNIT, Approximate

FLUSHED = 2.0**-63
"""Below it a routing score, the root of a float32 number, may be flushed to zero."""
NORMAL = 2.0**-126
"""The smallest normal number of float32 and bfloat16."""
TINY = 2.0**-120
"""Added to every bound: below it a device may flush to zero."""


def attention_bound(case: AttentionCase, dtype: torch.dtype) -> Tensor:
    """Largest error of each row, float64 `[T]`, for an operator that computes in a dtype."""
    bound = torch.full((len(case.q),), TINY, dtype=torch.float64)
    sink = 0.0 if case.sink is None else float(case.sink.abs().max())
    for row in range(len(case.q)):
        keys = case.keys(row)
        if not len(keys):
            continue
        logit = float((case.q[row].double().abs() @ keys.abs().T).max()) * case.scale
        relative = (2 * (case.q.shape[-1] + 4) * max(logit, sink) + 2 * len(keys) + 11) * FLOAT32
        if dtype is torch.bfloat16:
            relative += 2 * UNIT[dtype]
        bound[row] += math.sqrt(2) * float(keys.abs().max()) * (relative + UNIT[dtype])
    return bound


def index_scores(case: IndexerCase, row: int) -> tuple[Tensor, Tensor]:
    """Scores of a row's visible entries, and how far float32 accumulation may be off: float64 `[visible]` each."""
    keys, q, weights = case.logical_keys(row), case.q[row].double(), case.head_weights[row].double()
    scores = weights @ (q @ keys.T).relu()
    if case.exact:
        return scores, torch.zeros_like(scores)
    spread = weights.abs() @ (q.abs() @ keys.abs().T)
    flushed = weights.abs() @ (_subnormal(q) @ keys.abs().T + q.abs() @ _subnormal(keys).T)
    flushed = flushed + _subnormal(weights) @ (q.abs() @ keys.abs().T) + TINY * (1.0 + weights.abs().sum())
    return scores, (q.shape[1] + len(q) + 2) * FLOAT32 * spread + flushed


def _subnormal(values: Tensor) -> Tensor:
    """Magnitudes of the numbers that a device may flush to zero, 0 elsewhere."""
    return values.abs() * (values.abs() < NORMAL)


def routing_scores(case: MoeCase) -> tuple[Tensor, Tensor, Tensor]:
    """Routing of the gate: scores, scores with bias, and a bound on the relative error of a score, float64 `[T, E]`."""
    x, gate = case.x.double(), case.weights.gate.double()
    logits = x @ gate.T
    scores = (logits.clamp(min=0.0) + (-logits.abs()).exp().log1p()).sqrt()
    spread = torch.zeros_like(logits) if case.exact else (x.abs() @ gate.abs().T) * (x.shape[1] + 1) * FLOAT32
    # |d log sqrt(softplus(l)) / dl| <= 1/2; exponential, logarithm, sum and root are a few roundings.
    return scores, scores + case.weights.gate_bias.double(), torch.expm1(spread / 2) + 8 * FLOAT32


def route(case: MoeCase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The routing that the contract asks for.

    Returns:
        ids int64 `[T, k]` ascending; weights float64 `[T, k]`; a bound on their error, float64 `[T, k]`; and which
        rows are decided, bool `[T]`: the last expert chosen is ahead of the first one left out by more than the error,
        or ties with it exactly.
    """
    scores, ranking, error = routing_scores(case)
    topk = case.problem.topk
    ranked, order = ranking.sort(dim=-1, descending=True, stable=True)
    ids = order[:, :topk].sort(-1).values
    decided = torch.ones(len(scores), dtype=torch.bool)
    if topk < ranked.shape[1]:
        gap = ranked[:, topk - 1] - ranked[:, topk]
        noise = 2 * ((error * scores).amax(-1) + FLOAT32 * ranking.abs().amax(-1) + FLUSHED)
        decided = (gap > noise) | ((gap == 0) & case.exact & _tied_alike(scores, order, topk))
    chosen = scores.gather(-1, ids)
    factor = case.problem.routed_scaling / (chosen.sum(-1, keepdim=True) + 1e-20)
    weights = chosen * factor
    relative = 2 * error.amax(-1, keepdim=True) + (topk + 4) * FLOAT32
    return ids, weights, weights * relative + 2 * FLUSHED * factor, decided


def _tied_alike(scores: Tensor, order: Tensor, topk: int) -> Tensor:
    """Whether the two experts at the border tie because their scores and biases are equal, not by coincidence."""
    return scores.gather(-1, order[:, topk - 1 : topk])[:, 0] == scores.gather(-1, order[:, topk : topk + 1])[:, 0]


def moe_bound(case: MoeCase, dtype: torch.dtype) -> Approximate:
    """The output of a MoE call, and how far an operator that computes in a dtype may be off: `[T, H]`."""
    experts, shared = case.weights.experts, case.weights.shared
    if case.routing is None:
        ids, weights, weight_error, _ = route(case)
    else:
        ids, weights, weight_error = (
            case.routing[0].long(),
            case.routing[1].double(),
            torch.zeros(case.routing[1].shape),
        )
    value, error, spread = (torch.zeros(case.x.shape, dtype=torch.float64) for _ in range(3))
    local = ids - experts.expert_start

    def add(rows: Tensor, part: Approximate) -> None:
        value.index_add_(0, rows, part.value)
        error.index_add_(0, rows, part.error)
        spread.index_add_(0, rows, part.value.abs() + part.error)

    for expert in torch.unique(local[(ids >= 0) & (local >= 0) & (local < experts.num_local)]).tolist():
        rows, slots = ((local == expert) & (ids >= 0)).nonzero(as_tuple=True)
        w1, w3 = decode_mxfp4(experts.w13[expert], experts.w13_scale[expert], torch.float64)
        w2 = decode_mxfp4(experts.w2[expert], experts.w2_scale[expert], torch.float64)
        weight = weights[rows, slots, None]
        add(rows, _expert(case, case.x[rows], (w1, w3, w2), weight, weight_error[rows, slots, None], dtype))
    if shared is not None:
        one, rows = torch.ones(len(case.x), 1, dtype=torch.float64), torch.arange(len(case.x))
        add(rows, _expert(case, case.x, (shared.w1, shared.w3, shared.w2), one, torch.zeros_like(one), dtype))
    parts = ids.shape[1] + (shared is not None)
    result = Approximate(value, error + parts * FLOAT32 * spread).rounded(UNIT[dtype])
    return Approximate(result.value, result.error + TINY)


def _expert(
    case: MoeCase,
    x: Tensor,
    matrices: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    weight_error: Tensor,
    dtype: torch.dtype,
) -> Approximate:
    limit, quantize = case.problem.swiglu_limit, case.problem.activation_quantization == "released"
    w1, w3, w2 = (matrix.double() for matrix in matrices)
    token = Approximate.exactly(x)
    if quantize:
        token = token.quantized(dtype)
    a, b = token.product(w1, dtype), token.product(w3, dtype)
    gate, up = a.value.clamp(max=limit), b.value.clamp(-limit, limit)
    silu = gate * torch.sigmoid(gate)
    inner = silu * up * weight
    up_error = b.error.masked_fill(b.value.abs() - b.error >= limit, 0.0)
    error = weight * (_silu_error(a, limit) * (up.abs() + up_error) + silu.abs() * up_error)
    error = error + weight_error * (silu * up).abs() + 8 * FLOAT32 * inner.abs()
    product = Approximate(inner, error).rounded(UNIT[dtype])
    return (product.quantized(dtype) if quantize else product).product(w2, dtype)


def _silu_error(a: Approximate, limit: float) -> Tensor:
    """How far `silu(min(a, limit))` may be off: |silu'| <= 1.1, and (1 - h) e^h everywhere below h < 0."""
    highest = (a.value + a.error).clamp(max=0.0)
    slope = torch.where(highest < 0, ((1 - highest) * highest.exp()).clamp(max=1.1), 1.1)
    return (slope * a.error).masked_fill(a.value - a.error >= limit, 0.0)
