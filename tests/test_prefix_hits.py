"""A prompt that begins like an earlier one: what is found, what is run again, and that nothing shared is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_fixtures import PAGE_TOKENS, poison, pools, runner_of, text_tokens
from golden_sets import GOLDEN
from minideepinfer.config import EngineConfig
from minideepinfer.errors import RequestError
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.replay import replay_start, tail_rows
from minideepinfer.runtime.request import LogitsKind
from minideepinfer.runtime.runner import Runner
from scripted import published
from torch import Tensor

PREFIX = (("prefix", True),)
LENGTH = 300


def engine(name: str = "tiny-a", *, prefix: bool = True, chunk: int = 4096, **settings: Any) -> Engine:
    """An engine of its own over a runner that is loaded once; whatever was in its caches is NaN."""
    runner = runner_of(name, cache=PREFIX if prefix else (), max_tokens_per_step=chunk, **settings)
    poison(runner)
    return Engine(runner)


def run(engine: Engine, ids: tuple[int, ...], prompt: int, logits: LogitsKind = "last") -> Tensor:
    """Logits of the last prompt row and of all teacher-forced rows behind it."""
    request = engine.make_request(ids, len(ids), prompt, logits)
    rows = torch.cat(engine.score([request])[request.request_id])
    return rows[-(len(ids) - prompt) - 1 :] if logits != "last" else rows


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm(dim=-1).max() / b.norm(dim=-1).max())


@pytest.mark.parametrize("chunk", [4096, 37])
@pytest.mark.parametrize("replay", ["full", "halo"])
@pytest.mark.parametrize(("name", "shared"), [("tiny-a", 290), ("tiny-a", 209), ("tiny-b", 260)])
def test_a_hit_equals_a_cold_run(name: str, shared: int, replay: str, chunk: int) -> None:
    decode = 40
    first, ids = text_tokens(name, 1, LENGTH), text_tokens(name, 2, LENGTH + decode)
    ids = first[:shared] + ids[shared:]
    cold = run(engine(name, prefix=False, replay=replay), ids, LENGTH, "kept")
    warm = engine(name, replay=replay, chunk=chunk)
    run(warm, first, LENGTH)
    hit = run(warm, ids, LENGTH, "kept")
    assert warm.prefixes is not None
    assert warm.prefixes.statistics.hit_tokens == shared // PAGE_TOKENS[name] * PAGE_TOKENS[name]
    assert distance(hit, cold) < 1e-5


@pytest.mark.parametrize("replay", ["full", "halo"])
@pytest.mark.parametrize(("shared", "prompt"), [(208, 299), (160, 177), (292, 297), (209, 210)])
def test_odd_boundaries(replay: str, shared: int, prompt: int) -> None:
    """The prompt, the row at which replay starts, and what decoding completes may all cut a pair in two."""
    first, ids = text_tokens("tiny-a", 1, LENGTH), text_tokens("tiny-a", 2, prompt + 5)
    ids = first[:shared] + ids[shared:]
    cold = run(engine(prefix=False, replay=replay), ids, prompt, "kept")
    warm = engine(replay=replay, chunk=31)
    run(warm, first, LENGTH)
    assert distance(run(warm, ids, prompt, "kept"), cold) < 1e-5
    assert warm.prefixes is not None and warm.prefixes.statistics.hits == 1
    start = replay_start(warm.runner.config.text_config, replay, shared // 8 * 8, prompt)
    assert start % 2 or prompt == 210, "replay starts in the middle of a pair"


@pytest.mark.parametrize("replay", ["full", "halo", "bounded"])
def test_engram_uses_the_true_history_behind_a_hit(replay: str) -> None:
    """Rows that run again hash the tokens before them too, though those do not run."""
    first, ids = text_tokens("tiny-a", 1, LENGTH), text_tokens("tiny-a", 2, LENGTH)
    ids = first[:250] + ids[250:]
    whole, behind = Capture(["layers.*.engram.hash_ids"]), Capture(["layers.*.engram.hash_ids"])
    cold, warm = engine(prefix=False, replay=replay), engine(replay=replay, chunk=23)
    request = cold.make_request(ids, LENGTH, LENGTH, "last")
    cold.score([request], whole)
    expected = whole.of(request.request_id)
    run(warm, first, LENGTH)
    request = warm.make_request(ids, LENGTH, LENGTH, "last")
    warm.score([request], behind)
    found = behind.of(request.request_id)
    assert request.first_computed_token > 0 and found.keys() == expected.keys() and found
    for name, rows in found.items():
        assert torch.equal(rows, expected[name][-len(rows) :]), name
    layers = {int(name.split(".")[1]): len(rows) for name, rows in found.items()}
    assert layers[min(layers)] == LENGTH - request.first_computed_token, "replayed rows among them"


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "another checkpoint": ("tiny-b", {}),
    "another precision of what is stored": ("tiny-a", {"kv_quantization": "released"}),
    "another precision of operators": ("tiny-a", {"activation_quantization": "released"}),
    "another layout": ("tiny-a", {"layout": "bf16"}),
    "another dtype": ("tiny-a", {"dtype": "bfloat16"}),
    "another replay": ("tiny-a", {"replay": "bounded"}),
    "another operator": ("tiny-a", {"ops": {"residual": "naive"}}),
    "the same once more": ("tiny-a", {}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_another_engine_keeps_is_never_hit(other: str) -> None:
    """Whatever differs, and even if nothing does: trees and pools belong to one engine alone."""
    ids = text_tokens("tiny-a", 1, LENGTH)
    ids = tuple(i for i in ids if i < 256)
    one = fresh("tiny-a")
    run(one, ids, len(ids))
    name, settings = OTHERS[other]
    two = fresh(name, **settings)
    run(two, ids, len(ids))
    for engine in (one, two):
        assert engine.prefixes is not None and len(engine.prefixes) > 0
        assert (engine.prefixes.statistics.lookups, engine.prefixes.statistics.hits) == (1, 0)
    assert not {id(node) for _, node in published(one.prefixes)} & {id(node) for _, node in published(two.prefixes)}  # type: ignore[arg-type]
    assert not memory(one) & memory(two)


def fresh(name: str, *, layout: str = "auto", **settings: Any) -> Engine:
    """An engine over a runner of its own."""
    pages = {"page_tokens": PAGE_TOKENS[name], "num_pages": 64, "max_requests": 2, "prefix": True, "layout": layout}
    config = {"dtype": "float32", "device": "cpu", "kv_quantization": "none", "activation_quantization": "none"}
    return Engine(Runner(GOLDEN / name, EngineConfig(**config | {"cache": pages} | settings)))


def memory(engine: Engine) -> set[int]:
    """Where its pools lie."""
    return {pool.untyped_storage().data_ptr() for pool in pools(engine.runner)}


def test_bounded_replay_runs_one_window_again_and_is_close() -> None:
    first, ids = text_tokens("tiny-a", 1, LENGTH), text_tokens("tiny-a", 2, LENGTH)
    ids = first[:200] + ids[200:]
    cold = run(engine(prefix=False, replay="bounded"), ids, LENGTH)
    warm = engine(replay="bounded")
    run(warm, first, LENGTH)
    gap = distance(run(warm, ids, LENGTH), cold)
    assert warm.throughput.prefill_tokens == LENGTH + 100 + 16, "what is new, and a window of 16"
    assert 1e-7 < gap < 1, "an approximation by design, measured in test_bounded_gap"


@pytest.mark.parametrize("replay", ["full", "halo", "bounded"])
def test_shared_entries_are_never_written_again(replay: str) -> None:
    first, ids = text_tokens("tiny-a", 1, LENGTH), text_tokens("tiny-a", 2, LENGTH)
    warm = engine(replay=replay)
    run(warm, first, LENGTH)
    cache, shared = warm.runner.cache, 208
    pages = warm.prefixes.lookup(first, shared)  # type: ignore[union-attr]
    pools = {**cache.main, **{-1 - key: pool for key, pool in cache.index_keys.items()}}
    before = {key: pool[pages].clone() for key, pool in pools.items()}
    run(warm, first[:shared] + ids[shared:], LENGTH)
    assert warm.prefixes.statistics.hit_tokens == shared  # type: ignore[union-attr]
    for key, pool in pools.items():
        assert torch.equal(pool[pages], before[key]), key


def test_rows_that_run_again_are_counted_by_the_formula() -> None:
    config = runner_of("tiny-a").config.text_config
    assert (config.sliding_window, config.num_hidden_layers, config.candidate_source_layer_id) == (16, 9, 5)
    assert replay_start(config, "full", 200, 300) == 200 - 15 * 9
    assert replay_start(config, "halo", 200, 300) == 200 - 15 * 5
    tail = tail_rows(config, "halo")
    assert tail == 46
    assert replay_start(config, "halo", 290, 300) == 300 - 46 - 15 * 6, "the decoder's tail, and the window before it"
    assert replay_start(config, "bounded", 200, 300) == 184
    assert [replay_start(config, replay, 16, 300) for replay in ("full", "halo", "bounded")] == [0, 0, 0]


def test_a_hit_that_saves_nothing_is_a_miss() -> None:
    warm = engine(replay="full")
    first = text_tokens("tiny-a", 1, 140)
    run(warm, first, 140)
    run(warm, (*first[:136], 5, 6, 7), 139)
    assert warm.prefixes is not None
    assert warm.prefixes.statistics.hits == 1 and warm.prefixes.statistics.hit_tokens == 136
    run(warm, (*first[:128], 5, 6, 7), 131)
    assert warm.prefixes.statistics.hits == 1, "135 rows would run again"


def test_the_last_token_always_runs_and_all_logits_take_no_hit() -> None:
    warm = engine(replay="bounded")
    ids = text_tokens("tiny-a", 1, 64)
    cold = run(warm, ids, 64)
    again = run(warm, ids, 64)
    assert warm.prefixes is not None
    assert warm.prefixes.statistics.hit_tokens == 56
    assert again.shape == cold.shape == (1, again.shape[1])
    whole = run(warm, ids, 64, "all")
    assert warm.prefixes.statistics.hit_tokens == 56
    assert distance(whole, cold) < 1


def test_pages_of_earlier_prompts_make_room() -> None:
    warm = engine(replay="bounded")
    pages = warm.scheduler.pages
    for seed in range(1, 9):
        run(warm, text_tokens("tiny-a", seed, LENGTH), LENGTH)
        assert pages.num_free + len(warm.prefixes) == pages.num_pages  # type: ignore[arg-type]
    assert warm.prefixes is not None
    assert warm.prefixes.statistics.evicted_pages > 0
    assert run(warm, text_tokens("tiny-a", 8, LENGTH), LENGTH).isfinite().all()
    assert warm.prefixes.statistics.hits == 1, "the latest is still there"


def test_what_a_failed_step_wrote_is_never_found(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = engine(replay="bounded", chunk=64)
    ids = text_tokens("tiny-a", 1, LENGTH)
    steps = iter([True, False])

    def fails(*given: Any, **named: Any) -> Any:
        if next(steps):
            return execute(*given, **named)
        execute(*given, **named)
        raise RequestError("made up")

    execute = warm.runner.execute
    monkeypatch.setattr(warm.runner, "execute", fails)
    with pytest.raises(RequestError, match="made up"):
        run(warm, ids, LENGTH)
    assert warm.prefixes is not None
    assert len(warm.prefixes) == 64 // PAGE_TOKENS["tiny-a"], "the first step's pages"
    monkeypatch.setattr(warm.runner, "execute", execute)
    hit = run(warm, ids, LENGTH)
    assert warm.prefixes.statistics.hit_tokens == 64
    assert hit.isfinite().all()
