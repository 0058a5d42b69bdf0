"""Slow oracles written straight from the specification: loops over rows, heads and keys, in float64.

Each returns what an operator should return; what rounding may do to it is bounded by `minideepinfer.testing.bounds`.
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


def rope(vector: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """Rotate the last channels of one float64 vector, pair by pair (spec 3.4)."""
    rotated = vector.clone()
    start = len(vector) - 2 * len(cos)
    for i in range(len(cos)):
        a, b, c, s = vector[start + 2 * i], vector[start + 2 * i + 1], cos[i].double(), sign * sin[i].double()
        rotated[start + 2 * i], rotated[start + 2 * i + 1] = a * c - b * s, a * s + b * c
    return rotated


def attention(case: AttentionCase) -> Tensor:
    """Attention (spec 3.8), float64 `[T, H, D]`."""
    result = torch.zeros(case.q.shape, dtype=torch.float64)
    sink = None if case.sink is None else case.sink.double()
    for row in range(case.q.shape[0]):
        keys = case.keys(row)
        if not len(keys):
            continue
        for head in range(case.q.shape[1]):
            logits = (keys * case.q[row, head].double() * case.scale).sum(1).tolist()
            peak = max(logits + ([] if sink is None else [float(sink[head])]))
            weights = [math.exp(e - peak) for e in logits]
            denominator = sum(weights) + (0.0 if sink is None else math.exp(float(sink[head]) - peak))
            mixed = sum(w * key for w, key in zip(weights, keys, strict=True)) / denominator
            result[row, head] = rope(mixed, case.cos[row], case.sin[row], sign=-1.0)
    return result


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


def route(case: MoeCase, row: int) -> tuple[list[int], list[float]]:
    """Ids ascending, and weights (spec 3.10)."""
    weights, topk = case.weights, case.problem.topk
    logits = [float(case.x[row].double() @ gate.double()) for gate in weights.gate]
    scores = [math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))) for logit in logits]
    ranking = [score + float(bias) for score, bias in zip(scores, weights.gate_bias, strict=True)]
    order = sorted(range(len(ranking)), key=lambda e: (-ranking[e], e))
    ids = sorted(order[:topk])
    total = sum(scores[e] for e in ids) + 1e-20
    return ids, [scores[e] / total * case.problem.routed_scaling for e in ids]


def _expert(case: MoeCase, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weight: float) -> Tensor:
    limit, quantize = case.problem.swiglu_limit, case.problem.activation_quantization == "released"

    def given(vector: Tensor) -> Tensor:
        return qdq_fp8(vector.to(case.x.dtype)[None])[0].double() if quantize else vector

    token = given(x.double())
    gate, up = (w1 @ token).clamp(max=limit), (w3 @ token).clamp(-limit, limit)
    return w2 @ given(gate * torch.sigmoid(gate) * up * weight)


def moe(case: MoeCase, ids: list[list[int]], weights: list[list[float]]) -> Tensor:
    """The routed experts held here plus the shared one (spec 3.10), without any rounding, float64 `[T, H]`.

    Args:
        case: what was called.
        ids: chosen experts per row, -1 = none.
        weights: their weights.
    """
    experts, shared = case.weights.experts, case.weights.shared
    result = torch.zeros(case.x.shape, dtype=torch.float64)
    for row in range(len(case.x)):
        for expert, weight in zip(ids[row], weights[row], strict=True):
            local = expert - experts.expert_start
            if expert >= 0 and 0 <= local < experts.num_local:
                w1, w3 = (decode_fp4(experts.w13[local, i], experts.w13_scale[local, i]) for i in range(2))
                w2 = decode_fp4(experts.w2[local], experts.w2_scale[local])
                result[row] += _expert(case, case.x[row], w1, w3, w2, weight)
        if shared is not None:
            result[row] += _expert(case, case.x[row], shared.w1.double(), shared.w3.double(), shared.w2.double(), 1.0)
    return result
