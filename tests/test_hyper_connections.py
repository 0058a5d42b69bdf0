"""Single-pass mHC against loops written from spec 3.2 and 3.3, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from minideepinfer.config import ModelConfig
from minideepinfer.model.hyper_connections import Coefficients, coefficients, collapse, mix, sinkhorn
from minideepinfer.model.weights import HyperConnectionWeights
from torch import Tensor

DATA = Path(__file__).parent / "data"
CONFIG = ModelConfig.from_dict(json.loads((DATA / "config.tiny.json").read_text())).text_config
EPS = CONFIG.hc_eps


def site(width: int) -> HyperConnectionWeights:
    generator = torch.Generator().manual_seed(1)
    fn = torch.randn(24, 4 * width, generator=generator) / math.sqrt(4 * width)
    return HyperConnectionWeights(fn, torch.randn(24, generator=generator), torch.tensor([0.7, 1.3, 2.0]))


def oracle(streams: Tensor, weights: HyperConnectionWeights) -> tuple[list[float], list[float], list[list[float]]]:
    """One token, `[4, H]`, every line as the specification has it."""
    f = [float(v) for stream in streams.double() for v in stream]
    rho = 1 / math.sqrt(sum(v * v for v in f) / len(f) + 1e-20)
    m = [sum(w * v for w, v in zip(row, f, strict=True)) * rho for row in weights.fn.double().tolist()]
    scale = [float(weights.scale[0 if k < 4 else 1 if k < 8 else 2]) for k in range(24)]
    logits = [b + x * s for b, x, s in zip(weights.base.double().tolist(), m, scale, strict=True)]
    pre = [1 / (1 + math.exp(-v)) + EPS for v in logits[:4]]
    post = [2 / (1 + math.exp(-v)) for v in logits[4:8]]
    rows = [[math.exp(logits[8 + 4 * i + j]) for j in range(4)] for i in range(4)]
    comb = [[v / sum(row) + EPS for v in row] for row in rows]

    def columns(c: list[list[float]]) -> list[list[float]]:
        sums = [sum(c[i][j] for i in range(4)) + EPS for j in range(4)]
        return [[c[i][j] / sums[j] for j in range(4)] for i in range(4)]

    comb = columns(comb)
    for _ in range(CONFIG.hc_sinkhorn_iters - 1):
        comb = columns([[v / (sum(row) + EPS) for v in row] for row in comb])
    return pre, post, comb


def test_coefficients_equal_the_specification() -> None:
    streams = torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(0))
    weights = site(32)
    found = coefficients(streams, weights, CONFIG)
    for token in range(5):
        pre, post, comb = oracle(streams[token], weights)
        # float32 against float64: some ulps of a sum of 128 products, through 20 normalisations.
        for one, other in ((found.pre[token], pre), (found.post[token], post), (found.comb[token], comb)):
            torch.testing.assert_close(one.double(), torch.tensor(other).double(), rtol=2e-5, atol=1e-7)


def test_zero_streams_give_the_bases() -> None:
    weights = site(32)
    found = coefficients(torch.zeros(1, 4, 32), weights, CONFIG)
    torch.testing.assert_close(found.pre[0], torch.sigmoid(weights.base[:4]) + EPS)
    assert found.comb.isfinite().all()


def test_sinkhorn_ends_on_columns() -> None:
    comb = sinkhorn(torch.tensor([[[9.0, 0, 0], [0, 3, 0], [5, 0, 0]]]), iterations=2, eps=EPS)
    # Columns were divided last, by their sum + eps: they add up to one but for eps; after two rounds rows do not.
    assert (comb.sum(-2) - 1).abs().max() < 1e-5
    assert (comb.sum(-1) - 1).abs().max() > 1e-3


def test_mix_sends_source_to_destination() -> None:
    streams = torch.tensor([[[1.0], [10.0]]])
    comb = torch.tensor([[[0.0, 1.0], [0.5, 0.0]]])  # stream 0 goes to 1, half of stream 1 to 0
    mixed = mix(streams, torch.tensor([[100.0]]), Coefficients(torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]), comb))
    assert mixed.flatten().tolist() == [105.0, 201.0]


def test_collapse_weighs_streams() -> None:
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    assert collapse(streams, torch.tensor([[1.0, 0.5]])).tolist() == [[6.0, 12.0]]


def test_no_tokens() -> None:
    streams = torch.zeros(0, 4, 32)
    found = coefficients(streams, site(32), CONFIG)
    assert found.comb.shape == (0, 4, 4)
    assert mix(streams, torch.zeros(0, 32), found).shape == (0, 4, 32)
