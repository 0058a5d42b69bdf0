"""Work is counted, not timed: rows x layers with and without a hit, with and without bounded replay, by formula."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine_fixtures import PAGE_TOKENS, poison, runner_of, text_tokens
from minideepinfer.config import TextConfig
from minideepinfer.model.attention import AttentionLayer
from minideepinfer.model.block import Block
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.replay import replay_start
from minideepinfer.runtime.request import LogitsKind

PROMPT, SHARED = 300, 208


@pytest.fixture
def layer_rows(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Rows that attend, and rows that go through experts, by layer, as the model is called."""
    counts: Counter[tuple[str, int]] = Counter()
    forward, experts = AttentionLayer.forward, Block.experts

    def attends(self: AttentionLayer, x: Any, rows: Any, step: Any) -> Any:
        counts["attention", self.layer.layer_id] += len(x)
        return forward(self, x, rows, step)

    def is_mixed(self: Block, x: Any, rows: Any, step: Any) -> Any:
        counts["experts", self.layer.layer_id] += len(x)
        return experts(self, x, rows, step)

    monkeypatch.setattr(AttentionLayer, "forward", attends)
    monkeypatch.setattr(Block, "experts", is_mixed)
    return counts


def formula(config: TextConfig, replay: str, prompt: int, hit: int) -> tuple[int, int]:
    """Rows of each encoder layer and of each decoder layer (architecture section 6, spec 4.2 and 4.3)."""
    window, encoder, layers = config.sliding_window, config.candidate_source_layer_id, config.num_hidden_layers
    tail = window + (layers - encoder - 2) * (window - 1) if replay == "halo" else window
    again = {
        "full": (window - 1) * layers,
        "halo": (window - 1) * encoder + max(0, hit - (prompt - tail - (window - 1))),
        "bounded": window,
    }[replay]
    rows = prompt - hit + (again if hit else 0)
    return rows, rows if replay == "full" else min(rows, tail)


@pytest.mark.parametrize(("name", "chunk"), [("tiny-a", 4096), ("tiny-a", 37), ("tiny-b", 111)])
@pytest.mark.parametrize("shared", [0, SHARED, PROMPT - 8])
@pytest.mark.parametrize("replay", ["full", "halo", "bounded"])
def test_rows_times_layers(
    name: str, replay: str, shared: int, chunk: int, layer_rows: Counter[tuple[str, int]]
) -> None:
    runner = runner_of(name, replay=replay, cache=(("prefix", True),), max_tokens_per_step=chunk)
    config = runner.config.text_config
    poison(runner)
    engine = Engine(runner)
    first, ids = text_tokens(name, 1, PROMPT), text_tokens(name, 2, PROMPT)
    ids = first[:shared] + ids[shared:]
    if shared:
        run(engine, first)
    hit = shared // PAGE_TOKENS[name] * PAGE_TOKENS[name]
    layer_rows.clear()
    before = vars(engine.work).copy()
    run(engine, ids)
    work = {key: value - before[key] for key, value in vars(engine.work).items()}
    encoder, decoder = formula(config, replay, PROMPT, hit)
    boundary = config.candidate_source_layer_id
    expected = [encoder] * boundary + [decoder] * (config.num_hidden_layers - boundary)
    for part in ("attention", "experts"):
        assert [layer_rows[part, layer] for layer in range(config.num_hidden_layers)] == expected
    assert work == {"encoder_rows": encoder, "decoder_rows": decoder, "layer_rows": sum(expected)}
    if hit and replay != "full":
        assert sum(expected) < PROMPT * config.num_hidden_layers, "or the hit saves nothing"


def run(engine: Engine, ids: tuple[int, ...], logits: LogitsKind = "last") -> None:
    engine.score([engine.make_request(ids, len(ids), len(ids), logits)])


def test_at_the_released_sizes() -> None:
    """The issue's figures: 2,540 and 5,080 rows rebuild rings, 2,414 enter the decoder; 48 % of prefill is skipped."""
    from importlib import resources

    from minideepinfer.config import ModelConfig

    config = ModelConfig.from_file(str(resources.files("minideepinfer") / "data" / "config.full.json")).text_config
    prompt, hit = 131_072, 126_976
    again = {replay: hit - replay_start(config, replay, hit, prompt) for replay in ("full", "halo", "bounded")}
    assert again == {"full": 5080, "halo": 2540, "bounded": 128}
    assert formula(config, "full", prompt, hit) == (4096 + 5080, 4096 + 5080)
    assert formula(config, "halo", prompt, hit) == (4096 + 2540, 2414)
    assert formula(config, "bounded", prompt, hit) == (4096 + 128, 128)
    encoder, decoder = formula(config, "bounded", prompt, 0)
    assert (encoder, decoder) == (prompt, 128)
    assert 1 - (20 * encoder + 20 * decoder) / (40 * prompt) == pytest.approx(0.5, abs=1e-3), "of rows x layers"


def test_all_logits_take_no_hit_and_skip_nothing(layer_rows: Counter[tuple[str, int]]) -> None:
    runner = runner_of("tiny-a", replay="bounded", cache=(("prefix", True),))
    engine = Engine(runner)
    ids = text_tokens("tiny-a", 1, 90)
    run(engine, ids)
    layer_rows.clear()
    run(engine, ids, "all")
    assert set(layer_rows.values()) == {90}


def test_the_tails_of_several_prompts_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts in one step: the decoder is called once a layer, with both tails; none where no row is kept."""
    runner = runner_of("tiny-a", replay="bounded")
    poison(runner)
    engine = Engine(runner)
    calls: list[tuple[int, int]] = []
    experts = Block.experts

    def noted(self: Block, x: Any, rows: Any, step: Any) -> Any:
        calls.append((self.layer.layer_id, len(x)))
        return experts(self, x, rows, step)

    monkeypatch.setattr(Block, "experts", noted)
    prompts = [text_tokens("tiny-a", seed, length) for seed, length in ((1, 90), (2, 61))]
    engine.score([engine.make_request(ids, len(ids), len(ids), "last") for ids in prompts])
    assert calls == [(layer, 151 if layer < 5 else 32) for layer in range(9)]
