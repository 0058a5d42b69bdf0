"""Which prompt rows run the layers from the candidate source on, and what that changes."""

from __future__ import annotations

from itertools import repeat

import pytest
import torch
from engine_fixtures import Arrival, play, poison, runner_of, text_tokens
from golden_sets import GOLDEN
from minideepinfer import LLM, EngineConfig, SamplingParams
from minideepinfer.config import ModelConfig
from minideepinfer.runtime.batching import make_parts
from minideepinfer.runtime.replay import tail_rows
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import ScheduledRequest
from torch import Tensor

PROMPT = 90


def played(name: str, replay: str, chunk: int, decode: int) -> tuple[list[int], Tensor]:
    """A prompt in chunks, then teacher-forced tokens: the rows that reached the head."""
    runner = runner_of(name, replay=replay)
    poison(runner)
    ids = text_tokens(name, 3, PROMPT + decode)
    result = play(runner, [Arrival(ids, PROMPT)], repeat(chunk), logits="all" if replay == "full" else "kept")
    return result.rows(0)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_the_released_halo_has_2414_rows() -> None:
    from importlib import resources

    config = ModelConfig.from_file(str(resources.files("minideepinfer") / "data" / "config.full.json")).text_config
    assert [tail_rows(config, replay) for replay in ("full", "halo", "bounded")] == [None, 2414, 128]


@pytest.mark.parametrize("chunk", [PROMPT, 37])
@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_halo_equals_full_on_the_last_row_and_while_decoding(name: str, chunk: int) -> None:
    config = runner_of(name).config.text_config
    decode = 2 * config.sliding_window
    _, full = played(name, "full", chunk, decode)
    positions, halo = played(name, "halo", chunk, decode)
    rows = tail_rows(config, "halo")
    assert rows is not None and rows < PROMPT and positions == list(range(PROMPT - rows, PROMPT + decode))
    kept = positions.index(PROMPT - 1)
    for row, position in enumerate(positions[kept:], kept):
        assert distance(halo[row], full[position]) < 1e-5, position
    assert distance(halo[0], full[positions[0]]) > 1e-5, "its first row lacks its windows, or nothing was tested"


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_two_rows_less_than_the_halo_are_not_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tail_rows(runner_of(name).config.text_config, "halo")
    assert rows is not None
    _, full = played(name, "full", PROMPT, 0)
    _, halo = played(name, "halo", PROMPT, 0)
    monkeypatch.setattr("minideepinfer.runtime.batching.tail_rows", lambda config, replay: rows - 2)
    _, less = played(name, "bounded", PROMPT, 0)
    assert distance(halo[-1], full[-1]) < 1e-6
    assert distance(less[-1], full[-1]) > 1e-5, "the outermost row alone may weigh too little to be seen"


@pytest.mark.parametrize(("replay", "layers_rows"), [("full", 90), ("halo", 46), ("bounded", 16)])
def test_rows_behind_the_candidate_source(replay: str, layers_rows: int) -> None:
    config = runner_of("tiny-a").config.text_config
    request = Request(0, list(range(PROMPT)), PROMPT, PROMPT)
    (part,) = make_parts([ScheduledRequest(request, PROMPT)], config, replay)
    assert part.end - part.kept == layers_rows
    request = Request(1, list(range(PROMPT)), PROMPT, PROMPT, "all")
    (part,) = make_parts([ScheduledRequest(request, PROMPT)], config, replay)
    assert part.kept == 0, "all logits need all rows"


@pytest.mark.parametrize("chunk", [PROMPT, 37])
@pytest.mark.parametrize("replay", ["halo", "bounded"])
def test_the_candidate_source_publishes_the_entries_of_all_rows(replay: str, chunk: int) -> None:
    """Rows that end there leave the entries that they leave when every row runs every layer."""
    found = {}
    for kind in ("full", replay):
        runner = runner_of("tiny-a", replay=kind)
        poison(runner)
        request = Request(0, list(text_tokens("tiny-a", 3, PROMPT)), PROMPT, PROMPT, ring=0, pages=list(range(12)))
        while not request.all_computed:
            runner.execute([ScheduledRequest(request, min(chunk, request.num_pending_tokens))])
        source = runner.config.text_config.candidate_source_layer_id
        found[kind] = [pool[source].flatten(0, 1)[:PROMPT] for pool in (runner.cache.main, runner.cache.index_keys)]
    for own, full in zip(found[replay], found["full"], strict=True):
        assert own.isfinite().all()
        torch.testing.assert_close(own, full, rtol=1e-5, atol=1e-5)


def test_prompt_log_probabilities_run_all_rows() -> None:
    """They need every row's logits, so bounded replay cuts nothing, and they are those of full replay."""
    config = {"dtype": "float32", "device": "cpu", "kv_quantization": "none", "activation_quantization": "none"}
    ids, params = list(text_tokens("tiny-a", 3, PROMPT)), SamplingParams(max_tokens=1, prompt_logprobs=0)
    scores, work = {}, {}
    for replay in ("full", "bounded"):
        with LLM(GOLDEN / "tiny-a", EngineConfig(**config, replay=replay, cache={"page_tokens": 8})) as llm:
            (output,) = llm.generate(ids, params)
            scores[replay] = output.prompt_logprobs
            work[replay] = llm.engine.work.layer_rows
            llm.generate(ids, SamplingParams(max_tokens=1))
            work[replay, "last"] = llm.engine.work.layer_rows - work[replay]
    assert scores["bounded"] == scores["full"] and len(scores["full"] or ()) == PROMPT
    assert work["bounded"] == work["full"] == work["full", "last"] == 9 * PROMPT
    assert work["bounded", "last"] == 5 * PROMPT + 4 * 16
