"""Slow oracles written straight from the specification: loops over rows, heads and keys, in float64.

Each returns what an operator should return, and, where rounding matters, a bound on what rounding may do to it.
"""

from __future__ import annotations

import math

import torch
from minideepinfer.quantization import qdq_fp8
from minideepinfer.testing.recipes.attention import AttentionCase
from minideepinfer.testing.recipes.batch import locate
from minideepinfer.testing.recipes.indexer import IndexerCase
from minideepinfer.testing.recipes.moe import MoeCase
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Largest relative error of one rounding, for 24 and 8 significant bits."""
FLOAT32 = UNIT[torch.float32]


def rope(vector: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """Rotate the last channels of one float64 vector, pair by pair (spec 3.4)."""
    rotated = vector.clone()
    start = len(vector) - 2 * len(cos)
    for i in range(len(cos)):
        a, b, c, s = vector[start + 2 * i], vector[start + 2 * i + 1], cos[i].double(), sign * sin[i].double()
        rotated[start + 2 * i], rotated[start + 2 * i + 1] = a * c - b * s, a * s + b * c
    return rotated


def attention(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """Attention (spec 3.8) and a bound `[T]` on an operator's error.

    The bound, with u = 2^-24, D channels, N keys, E = largest `scale * sum |q_i k_i|`, V = largest |key channel|:
    a float32 logit is off by at most (D + 2) u E, and by another 2 u E when the maximum (at most E, or the sink) is
    subtracted; the exponential and the sums over N keys add (2 N + 8) u; numerator and denominator both move, hence
    the factor 2 on the logits; a rotation turns an error of V into at most sqrt(2) V, with 3 u of its own. In
    bfloat16 (unit w = 2^-8) come: probabilities rounded, w V; head rounded before the rotation, sqrt(2) w V; and
    after it, sqrt(2) w V.
    """
    result = torch.zeros(case.q.shape, dtype=torch.float64)
    bound = torch.zeros(case.q.shape[0], dtype=torch.float64)
    sink = None if case.sink is None else case.sink.double()
    for row in range(case.q.shape[0]):
        keys = case.keys(row)
        if not len(keys):
            continue
        largest = 0.0 if sink is None else float(sink.abs().max())
        for head in range(case.q.shape[1]):
            q = case.q[row, head].double()
            terms = keys * q * case.scale
            logits = terms.sum(1).tolist()
            peak = max(logits + ([] if sink is None else [float(sink[head])]))
            weights = [math.exp(e - peak) for e in logits]
            denominator = sum(weights) + (0.0 if sink is None else math.exp(float(sink[head]) - peak))
            mixed = sum(w * key for w, key in zip(weights, keys, strict=True)) / denominator
            result[row, head] = rope(mixed, case.cos[row], case.sin[row], sign=-1.0)
            largest = max(largest, float(terms.abs().sum(1).max()))
        relative = (2 * (case.q.shape[-1] + 4) * largest + 2 * len(keys) + 8 + 3) * FLOAT32
        if case.q.dtype is torch.bfloat16:
            relative += UNIT[torch.bfloat16] * 2
        bound[row] = math.sqrt(2) * float(keys.abs().max()) * (relative + UNIT[case.q.dtype])
    return result, bound


def index_scores(case: IndexerCase, row: int) -> list[float]:
    """Float32 scores of a row's visible entries (spec 3.6)."""
    batch, ratio = case.batch, case.problem.compress_ratio
    scores = []
    for entry in range((int(batch.positions[row]) + 1) // ratio):
        key = case.index_keys[locate(batch, int(batch.request_ids[row]), entry, ratio)].double()
        dots = [max(0.0, float(q.double() @ key)) for q in case.q[row]]
        score = math.fsum(float(w) * dot for w, dot in zip(case.head_weights[row], dots, strict=True))
        scores.append(float(torch.tensor(score, dtype=torch.float32)))
    return scores


def _top(scores: dict[int, float], count: int) -> list[int]:
    """The best keys, the lower one first among equal scores."""
    return sorted(scores, key=lambda number: (-scores[number], number))[:count]


def select(case: IndexerCase, row: int) -> tuple[set[int], set[int]]:
    """Selected entries and candidate blocks of a row (spec 3.6, 3.7)."""
    problem = case.problem
    scores = dict(enumerate(index_scores(case, row)))
    blocks: dict[int, float] = {}
    for entry, score in scores.items():
        block = entry // problem.candidate_block_size
        blocks[block] = max(score, blocks.get(block, -math.inf))
    if scores:
        blocks[max(blocks)] = math.inf
    if case.candidates is not None:
        given = set(case.candidates[row].tolist())
        scores = {entry: s for entry, s in scores.items() if entry // problem.candidate_block_size in given}
    return set(_top(scores, problem.topk)), set(_top(blocks, problem.candidate_topk_blocks))


def decode_fp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """MXFP4 (spec 2.2), number by number: float64 `[rows, columns]`."""
    rows = []
    for row_codes, row_exponents in zip(packed.tolist(), exponents.tolist(), strict=True):
        nibbles = [nibble for byte in row_codes for nibble in (byte & 15, byte >> 4)]
        rows.append(
            [
                math.copysign(E2M1[code & 7], -1.0 if code & 8 else 1.0) * 2.0 ** (row_exponents[i // 32] - 127)
                for i, code in enumerate(nibbles)
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


def route(case: MoeCase, row: int) -> tuple[list[int], list[float], float]:
    """Ids ascending, weights, and how far the last chosen one is above the first one left out (spec 3.10)."""
    weights, topk = case.weights, case.problem.topk
    logits = [float(case.x[row].double() @ gate.double()) for gate in weights.gate]
    scores = [math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))) for logit in logits]
    ranking = [score + float(bias) for score, bias in zip(scores, weights.gate_bias, strict=True)]
    order = sorted(range(len(ranking)), key=lambda e: (-ranking[e], e))
    margin = ranking[order[topk - 1]] - ranking[order[topk]] if topk < len(order) else math.inf
    ids = sorted(order[:topk])
    total = sum(scores[e] for e in ids) + 1e-20
    return ids, [scores[e] / total * case.problem.routed_scaling for e in ids], margin


class _Approximate:
    """A float64 vector and a bound on how far an operator's numbers may be from it: running error analysis."""

    def __init__(self, value: Tensor, error: Tensor) -> None:
        self.value, self.error = value, error

    def rounded(self, unit: float) -> _Approximate:
        return _Approximate(self.value, self.error + unit * (self.value.abs() + self.error))

    def product(self, weight: Tensor, dtype: torch.dtype) -> _Approximate:
        """`weight @ self`, accumulated in float32 (K + 1 roundings at most), rounded to the compute dtype."""
        spread = weight.abs() @ (self.value.abs() + self.error)
        error = weight.abs() @ self.error + (len(self.value) + 1) * FLOAT32 * spread
        return _Approximate(weight @ self.value, error).rounded(UNIT[dtype])

    def quantized(self, dtype: torch.dtype) -> _Approximate:
        """QDQ-FP8: monotone, so the codes of both ends enclose those in between."""
        value, low, high = (
            qdq_fp8(x.to(dtype)[None])[0].double()
            for x in (self.value, self.value - self.error, self.value + self.error)
        )
        return _Approximate(value, (high - value).abs().maximum((value - low).abs()))


def _expert(
    case: MoeCase, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weight: float, weight_error: float
) -> _Approximate:
    dtype, limit = case.x.dtype, case.problem.swiglu_limit
    quantize = case.problem.activation_quantization == "released"
    token = _Approximate(x.double(), torch.zeros(len(x), dtype=torch.float64))
    if quantize:
        token = token.quantized(dtype)
    a, b = token.product(w1, dtype), token.product(w3, dtype)
    gate, up = a.value.clamp(max=limit), b.value.clamp(-limit, limit)
    silu = gate * torch.sigmoid(gate)
    # |silu'| <= 1.1; silu, its product and the weighting are a few float32 roundings.
    error = weight * (1.1 * a.error * (up.abs() + b.error) + silu.abs() * b.error)
    inner = _Approximate(silu * up * weight, error + (8 * FLOAT32 + weight_error) * (silu * up * weight).abs())
    inner = inner.rounded(UNIT[dtype])
    if quantize:
        inner = inner.quantized(dtype)
    return inner.product(w2, dtype)


def moe(case: MoeCase, ids: list[list[int]], weights: list[list[float]], weight_error: float) -> tuple[Tensor, Tensor]:
    """The routed experts held here plus the shared one (spec 3.10), and a bound on an operator's error.

    Args:
        case: what was called.
        ids: chosen experts per row, -1 = none.
        weights: their weights.
        weight_error: relative error the operator's own weights may have.

    Returns:
        Two float64 `[T, H]`.
    """
    experts, shared, dtype = case.weights.experts, case.weights.shared, case.x.dtype
    result, bound = (torch.zeros(case.x.shape, dtype=torch.float64) for _ in range(2))
    for row in range(len(case.x)):
        parts = []
        for expert, weight in zip(ids[row], weights[row], strict=True):
            local = expert - experts.expert_start
            if expert >= 0 and 0 <= local < experts.num_local:
                w1, w3 = (decode_fp4(experts.w13[local, i], experts.w13_scale[local, i]) for i in range(2))
                w2 = decode_fp4(experts.w2[local], experts.w2_scale[local])
                parts.append(_expert(case, case.x[row], w1, w3, w2, weight, weight_error))
        if shared is not None:
            matrices = (shared.w1.double(), shared.w3.double(), shared.w2.double())
            parts.append(_expert(case, case.x[row], *matrices, 1.0, 0.0))
        if parts:
            spread = torch.stack([part.value.abs() + part.error for part in parts]).sum(0)
            result[row] = torch.stack([part.value for part in parts]).sum(0)
            error = torch.stack([part.error for part in parts]).sum(0) + len(parts) * FLOAT32 * spread
            bound[row] = _Approximate(result[row], error).rounded(UNIT[dtype]).error
    return result, bound
