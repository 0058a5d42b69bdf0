"""Single-pass mHC against loops written from spec 3.2 and 3.3, in float64."""

from __future__ import annotations

import json
import math
from itertools import repeat
from pathlib import Path

import torch
from engine_fixtures import Arrival, play, poison, runner_of, text_tokens
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.operators import Coefficients, HyperConnectionWeights, Phase
from minideepinfer.runtime.problems import layer_problems
from minideepinfer.testing.recipes.batch import context
from minideepinfer_residual.naive import NaiveResidual, build, sinkhorn
from torch import Tensor

DATA = Path(__file__).parent / "data"
MODEL = ModelConfig.from_dict(json.loads((DATA / "config.tiny.json").read_text()))
CONFIG = MODEL.text_config
EPS = CONFIG.hc_eps


def naive() -> NaiveResidual:
    """The reference, as the tiny model asks for it."""
    return build(context(layer_problems(MODEL, EngineConfig(), "cpu", None)["residual", None, Phase.PREFILL]))


def coefficients(streams: Tensor, weights: HyperConnectionWeights) -> Coefficients:
    """Of a site."""
    return naive().enter(streams, streams[:, :, 0], weights, torch.ones(streams.shape[-1])).site


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
    found = coefficients(streams, weights)
    for token in range(5):
        pre, post, comb = oracle(streams[token], weights)
        # float32 against float64: some ulps of a sum of 128 products, through 20 normalisations.
        for one, other in ((found.pre[token], pre), (found.post[token], post), (found.comb[token], comb)):
            torch.testing.assert_close(one.double(), torch.tensor(other).double(), rtol=2e-5, atol=1e-7)


def test_zero_streams_give_the_bases() -> None:
    weights = site(32)
    found = coefficients(torch.zeros(1, 4, 32), weights)
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
    site = Coefficients(torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]), comb)
    mixed = naive().mix(streams, torch.tensor([[100.0]]), site)
    assert mixed.flatten().tolist() == [105.0, 201.0]


def test_collapse_weighs_streams() -> None:
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    assert naive().collapse(streams, torch.tensor([[1.0, 0.5]]), None).tolist() == [[6.0, 12.0]]


def test_no_tokens() -> None:
    streams = torch.zeros(0, 4, 32)
    found = coefficients(streams, site(32))
    assert found.comb.shape == (0, 4, 4)
    assert naive().mix(streams, torch.zeros(0, 32), found).shape == (0, 4, 32)


def test_one_rounding_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(3)
    streams, output = torch.randn(9, 4, 16, generator=generator), torch.randn(9, 16, generator=generator)
    streams, output = streams.bfloat16(), output.bfloat16()
    site = Coefficients(*(torch.rand(9, *shape, generator=generator) for shape in ((4,), (4,), (4, 4))))
    exact = torch.einsum("tij,tid->tjd", site.comb.double(), streams.double())
    exact += site.post.double().unsqueeze(-1) * output.double().unsqueeze(1)
    mixed = naive().mix(streams, output, site)
    assert mixed.dtype is torch.bfloat16
    assert torch.equal(mixed, exact.float().bfloat16())
    assert torch.equal(
        naive().collapse(streams, site.pre, None),
        (site.pre.double().unsqueeze(-1) * streams.double()).sum(1).float().bfloat16(),
    )


def test_pre_belongs_to_the_next_site() -> None:
    """What enters a sublayer is collapsed by the site before: the attention site's `pre` at the experts, and so on."""
    runner = runner_of("tiny-a")
    poison(runner)
    ids = text_tokens("tiny-a", 0, 12)
    names = ("*.streams_out", "*.next_pre_mix", "*.hc_ffn.pre", "*.attn.in", "*.hc_attn.pre", "embed")
    captured = play(runner, [Arrival(ids, 12)], repeat(12), capture=names).capture.of(0)
    config = runner.config.text_config

    def normed(streams: Tensor, pre: Tensor, layer: int) -> Tensor:
        x = (pre.double().unsqueeze(-1) * streams.double()).sum(1)
        return x * x.square().mean(-1, keepdim=True).rsqrt() * runner.model.weights.layers[layer].attn_norm.double()

    first = captured["embed"].unsqueeze(1).repeat(1, config.hc_mult, 1)
    one_hot = torch.tensor([1.0, 0, 0, 0]).repeat(12, 1)
    assert torch.allclose(captured["layers.0.attn.in"].double(), normed(first, one_hot, 0), atol=1e-5)
    for layer in range(1, config.num_hidden_layers):
        before = f"layers.{layer - 1}"
        assert torch.equal(captured[f"{before}.next_pre_mix"], captured[f"{before}.hc_ffn.pre"])
        if config.layers[layer].engram_index is None:
            expected = normed(captured[f"{before}.streams_out"], captured[f"{before}.hc_ffn.pre"], layer)
            wrong = normed(captured[f"{before}.streams_out"], captured[f"layers.{layer}.hc_attn.pre"], layer)
            found = captured[f"layers.{layer}.attn.in"].double()
            assert torch.allclose(found, expected, atol=1e-5)
            assert (found - wrong).norm() > 0.01 * found.norm()


def test_a_block_enters_the_next_site_unless_engram_or_nothing_follows() -> None:
    runner = runner_of("tiny-a")
    layers, blocks = runner.config.text_config.layers, runner.model.blocks
    for layer, block, follower in zip(layers[1:], blocks, blocks[1:], strict=False):
        expected = follower.attention_site if layer.engram_index is None else None
        assert block.following is expected
    assert blocks[-1].following is None
    assert {block.following is None for block in blocks} == {True, False}
