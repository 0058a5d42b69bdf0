"""From scheduled requests to the rows of a step: phases, history, bounded replay, wanted rows, odd prompts."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest
import torch
from engine_fixtures import Arrival, play, poison, runner_of, text_tokens
from minideepinfer.cache.kv_cache import ring_size
from minideepinfer.errors import ConfigError
from minideepinfer.operators import Phase
from minideepinfer.runtime.batching import build_step, make_parts, wanted_rows
from minideepinfer.runtime.request import LogitsKind, Request
from minideepinfer.runtime.scheduler import ScheduledRequest


def scheduled(
    number: int, computed: int, count: int, prompt: int, known: int = 0, logits: LogitsKind = "last"
) -> ScheduledRequest:
    ids = list(text_tokens("tiny-a", number + 1, max(prompt, known)))
    pages = list(range(20 * number, 20 * number + 12))
    return ScheduledRequest(Request(number, ids, prompt, len(ids), logits, computed, number, pages), count)


def test_decode_comes_first_and_a_first_chunk_is_never_decode() -> None:
    config = runner_of("tiny-a").config.text_config
    items = [scheduled(0, 0, 1, 1), scheduled(1, 10, 6, 40), scheduled(2, 10, 7, 40), scheduled(3, 40, 1, 40, 50)]
    parts = make_parts(items, config, "full")
    assert [(part.request.request_id, part.phase) for part in parts] == [
        (1, Phase.DECODE),
        (3, Phase.DECODE),
        (0, Phase.PREFILL),
        (2, Phase.PREFILL),
    ]


@pytest.mark.parametrize(
    ("item", "replay", "kept", "wanted"),
    [
        (scheduled(0, 0, 40, 40), "full", 0, [39]),
        (scheduled(0, 0, 20, 40), "full", 0, []),
        (scheduled(0, 0, 40, 40, 41), "full", 0, []),  # another known token follows
        (scheduled(0, 0, 40, 40, logits="kept"), "full", 0, list(range(40))),
        (scheduled(0, 0, 40, 40), "bounded", 24, [39]),
        (scheduled(0, 0, 20, 40), "bounded", 20, []),
        (scheduled(0, 20, 10, 40, logits="kept"), "bounded", 24, list(range(24, 30))),
        (scheduled(0, 0, 24, 40, logits="kept"), "bounded", 24, []),
        (scheduled(0, 0, 40, 40, logits="all"), "bounded", 0, list(range(40))),
        (scheduled(0, 0, 10, 10, logits="kept"), "bounded", 0, list(range(10))),  # shorter than a window
        (scheduled(0, 45, 1, 40, 50, logits="kept"), "bounded", 45, [45]),
    ],
)
def test_kept_and_wanted_positions(item: ScheduledRequest, replay: str, kept: int, wanted: list[int]) -> None:
    (part,) = make_parts([item], runner_of("tiny-a").config.text_config, replay)
    assert part.kept == kept
    assert list(part.wanted) == wanted


def test_bounded_step_narrows_each_request_to_its_own_tail() -> None:
    runner = runner_of("tiny-a")
    config = runner.config.text_config
    items = [scheduled(0, 20, 8, 40, logits="kept"), scheduled(1, 0, 5, 60), scheduled(2, 41, 1, 40, 50, "kept")]
    parts = make_parts(items, config, "bounded")
    step = build_step(parts, config, runner.engram_hash, 8, runner.device)
    assert step.encoder.positions.tolist() == [41, *range(20, 28), *range(5)]
    assert step.narrowing is not None
    assert step.narrowing.kept.tolist() == [0, 5, 6, 7, 8]
    assert step.narrowing.dropped.tolist() == [1, 2, 3, 4, 9, 10, 11, 12, 13]
    assert step.narrowing.dropped_rows.positions.tolist() == [20, 21, 22, 23, 0, 1, 2, 3, 4]
    for rows in (step.source, step.decoder):
        assert rows.positions.tolist() == [41, 24, 25, 26, 27]
        assert rows.seqlens == (1, 4, 0)
    floors = [batch.window_start.tolist() for batch in step.decoder.batches]
    assert floors == [[24], [24, 44]]
    assert [batch.window_start.tolist() for batch in step.source.batches] == [[0], [0, 0]]
    assert wanted_rows(parts).tolist() == [0, 1, 2, 3, 4]


def test_history_comes_from_the_request_itself_across_chunks() -> None:
    runner = runner_of("tiny-a")
    config = runner.config.text_config
    whole = build_step(
        make_parts([scheduled(0, 0, 30, 30)], config, "full"), config, runner.engram_hash, 8, torch.device("cpu")
    )
    for start in (1, 2, 3, 4, 17):
        items = [scheduled(1, 0, 9, 30), scheduled(0, start, 30 - start, 30)]
        parts = make_parts(items, config, "full")
        step = build_step(parts, config, runner.engram_hash, 8, runner.device)
        mine = step.encoder.request_ids == [part.request.request_id for part in parts].index(0)
        for rows, expected in zip(step.engram_rows, whole.engram_rows, strict=True):
            assert torch.equal(rows[mine], expected[start:])


@pytest.mark.parametrize("replay", ["full", "bounded"])
def test_an_empty_step_runs(replay: str) -> None:
    assert runner_of("tiny-a", replay=replay).execute([]) == []


@pytest.mark.parametrize("replay", ["full", "bounded"])
@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_a_prompt_of_one_token(name: str, replay: str) -> None:
    ids = text_tokens(name, 0, 1)
    results = []
    for runner in (runner_of(name, replay=replay), runner_of(name)):
        poison(runner)
        results.append(play(runner, [Arrival(ids, 1)], repeat(1)).rows(0)[1])
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


def test_pages_rings_and_budgets_of_any_size() -> None:
    """Prompts longer than a ring, pages of 4 and 64 tokens, one ring that serves three requests in turn."""
    assert ring_size(runner_of("tiny-a").config.text_config) == 22
    expected = {}
    for settings in (
        {"page_tokens": 8, "num_pages": 64, "max_requests": 4},
        {"page_tokens": 4, "num_pages": 23, "max_requests": 1},
        {"page_tokens": 64, "num_pages": 2, "max_requests": 1},
    ):
        runner = runner_of("tiny-a", cache=tuple(settings.items()))
        poison(runner)
        scenario = [
            Arrival(text_tokens("tiny-a", seed, length), length - 3) for seed, length in ((0, 90), (1, 7), (2, 45))
        ]
        played = play(runner, scenario, repeat(90))
        for number in range(3):
            rows = played.rows(number)[1]
            reference = expected.setdefault(number, rows)
            assert ((rows - reference).norm(dim=1) <= 1e-5 * reference.norm(dim=1)).all()


@pytest.mark.parametrize("page_tokens", [1, 2, 3, 6])
def test_pages_that_would_split_an_entry_or_a_candidate_block_are_refused(page_tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"cache\.page_tokens: {page_tokens} is no multiple of [24]"):
        runner_of("tiny-a", cache=(("page_tokens", page_tokens),))


@pytest.mark.parametrize("quantization", ["none", "released"])
def test_bfloat16_on_a_cpu_is_finite(quantization: str) -> None:
    runner = runner_of("tiny-a", quantization, dtype="bfloat16", activation_quantization=quantization)
    poison(runner)
    rows = play(runner, [Arrival(text_tokens("tiny-a", 0, 60), 50)], repeat(13)).rows(0)[1]
    assert rows.dtype is torch.float32
    assert torch.isfinite(rows).all()


@pytest.mark.parametrize("device", ["cuda:7", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(device: Any) -> None:
    with pytest.raises(ConfigError, match=rf"device: {device} is not here, this machine has \d CUDA devices; cpu"):
        runner_of("tiny-a", device=device)
