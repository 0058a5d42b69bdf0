"""What must not change a request's logits: chunks, neighbours, pages, rings, stale memory, later tokens, aborts.

Two runs differ by the order of sums, about 1e-6. Where two scores at a cut are as close as that, a choice may fall
otherwise and change everything that reads it. Such rows are left out as narrowly as can be proved: a choice counts only
if it *did* fall otherwise; the first ones to do so must have had a margin below `CLEAR_MARGIN`; and only rows that a
changed stream can reach, through a window or a visible global entry, are left out (`trace_choices`). They are counted,
and may be at most 1 % of all rows.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import cycle, repeat
from typing import Any

import pytest
import torch
from engine_fixtures import Arrival, play, poison, runner_of, text_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minideepinfer.runtime.request import LogitsKind
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.margins import CHOICES, CLEAR_MARGIN, SCORED, choice_margins, trace_choices
from torch import Tensor

TOLERANCE = 1e-5
LENGTH = 90
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
QUICK = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=CHECKS)
THOROUGH = settings(max_examples=300, deadline=None, suppress_health_check=CHECKS)


@cache
def reference(name: str, seed: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """A sequence alone, in one prefill: logits `[T, vocab]`, what was captured, margins of its choices."""
    runner = runner_of(name)
    poison(runner)
    ids = text_tokens(name, seed, LENGTH)
    played = play(runner, [Arrival(ids, len(ids))], repeat(LENGTH), capture=(*CHOICES, *SCORED))
    captured = played.capture.of(0)
    margins = choice_margins(captured, runner.config.text_config, runner.model.weights.layers)
    return played.rows(0)[1], captured, margins


@st.composite
def arrivals(draw: st.DrawFn, most: int = 5) -> list[Arrival]:
    """Prefixes of a few sequences; the first step has one, some are given up, and more may come than rings exist."""
    found = []
    for number in range(draw(st.integers(1, most))):
        length = draw(st.integers(1, LENGTH))
        prompt = length - draw(st.integers(0, min(12, length - 1)))
        step = 0 if number == 0 else draw(st.integers(0, 6))
        abort_at = step + draw(st.integers(0, 6)) if draw(st.integers(0, 3)) == 0 else None
        ids = text_tokens("tiny-a", draw(st.integers(0, 7)), LENGTH)[:length]
        found.append(Arrival(ids, prompt, step, abort_at))
    return found


BUDGETS = st.lists(st.sampled_from([1, 2, 3, 5, 6, 7, 8, 13, 16, 21, 22, 23, 40, 64, 200]), min_size=1, max_size=6)


def compare(name: str, scenario: list[Arrival], budgets: list[int], seed: int, seen: Counter[str]) -> None:
    """Play a scenario in poisoned memory and compare every row with the sequence alone in one prefill."""
    runner = runner_of(name)
    poison(runner)
    played = play(runner, scenario, cycle(budgets), seed, CHOICES)
    for number, arrival in enumerate(scenario):
        if number not in played.logits:
            assert arrival.abort_at is not None
            continue
        positions, rows = played.rows(number)
        count = len(rows)
        assert positions == list(range(count))
        assert count == len(arrival.token_ids) or arrival.abort_at is not None
        logits, captured, margins = reference(name, sequence_of(name, arrival))
        prefix = {key: value[:count] for key, value in captured.items()}
        trace = trace_choices(prefix, played.capture.of(number), runner.config.text_config)
        for key, roots in trace.roots.items():
            assert (margins[key][:count][roots] < CLEAR_MARGIN).all(), f"{key}: a clear choice fell otherwise"
        error = (rows - logits[:count]).norm(dim=1) / logits[:count].norm(dim=1)
        kept = ~trace.affected
        assert (error[kept] <= TOLERANCE).all(), f"request {number}: {error[kept].max()} in row {error[kept].argmax()}"
        seen["rows"] += count
        seen["left out"] += int(trace.affected.sum())
        seen["steps"] += played.steps


def sequence_of(name: str, arrival: Arrival) -> int:
    """Which sequence an arrival is a prefix of; two that share a prefix serve equally."""
    length = len(arrival.token_ids)
    return next(seed for seed in range(8) if text_tokens(name, seed, LENGTH)[:length] == arrival.token_ids)


def check_scenarios(profile: settings) -> None:
    seen: Counter[str] = Counter()

    @profile
    @given(arrivals(), BUDGETS, st.integers(0, 1000))
    def check(scenario: list[Arrival], budgets: list[int], seed: int) -> None:
        compare("tiny-a", scenario, budgets, seed, seen)

    check()
    print(dict(seen))
    assert seen["rows"] > 30 * profile.max_examples
    assert seen["left out"] <= 0.01 * seen["rows"]


def test_nothing_but_its_tokens_changes_a_request() -> None:
    check_scenarios(QUICK)


@pytest.mark.thorough
def test_nothing_but_its_tokens_changes_a_request_thorough() -> None:
    check_scenarios(THOROUGH)


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
@pytest.mark.parametrize(("prompt", "budgets"), [(1, [1]), (41, [7]), (LENGTH, [23])])
def test_prefill_then_decode_equals_one_prefill(name: str, prompt: int, budgets: list[int]) -> None:
    seen: Counter[str] = Counter()
    compare(name, [Arrival(text_tokens(name, 0, LENGTH), prompt)], budgets, 3, seen)
    assert (seen["rows"], seen["left out"]) == (LENGTH, 0)


def test_a_mixed_step_on_released_head_sizes() -> None:
    seen: Counter[str] = Counter()
    ids = [text_tokens("tiny-b", seed, LENGTH) for seed in range(3)]
    scenario = [Arrival(ids[0][:40], 30), Arrival(ids[1][:64], 64, 1, abort_at=3), Arrival(ids[2][:57], 55, 2)]
    compare("tiny-b", scenario, [30, 21, 9, 40], 5, seen)
    assert seen["rows"] > 97
    assert seen["left out"] == 0


def test_the_trace_lets_no_mistake_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: a pool whose entry changed between two steps is noticed."""
    runner = runner_of("tiny-a")
    execute = runner.execute

    def spoil(*args: Any) -> Any:
        results = execute(*args)
        runner.cache.main[2][:] = runner.cache.main[2].roll(1, dims=1)
        return results

    monkeypatch.setattr(runner, "execute", spoil)
    ids = text_tokens("tiny-a", 0, LENGTH)
    with pytest.raises(AssertionError, match=r"fell otherwise|request 0"):
        compare("tiny-a", [Arrival(ids, LENGTH)], [50], 0, Counter())


# Bounded replay


def kept_alone(runner: Runner, ids: tuple[int, ...], prompt: int) -> tuple[list[int], Tensor]:
    """Logits of the kept rows, the prompt in one chunk."""
    poison(runner)
    return play(runner, [Arrival(ids, prompt)], repeat(LENGTH), logits="kept").rows(0)


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_bounded_replay_does_not_depend_on_chunks_and_neighbours(name: str) -> None:
    """Every choice of these sequences is clear, in bounded replay too, so every kept row must agree."""
    runner = runner_of(name, replay="bounded")
    text, rng = runner.config.text_config, random.Random(3)
    alone = {}
    for seed in range(3):
        ids = text_tokens(name, seed, LENGTH)
        poison(runner)
        played = play(runner, [Arrival(ids, LENGTH)], repeat(LENGTH), capture=SCORED, logits="kept")
        margins = choice_margins(played.capture.of(0), text, runner.model.weights.layers)
        assert min(float(m.min()) for m in margins.values()) > CLEAR_MARGIN
        assert len(margins[f"layers.{text.num_hidden_layers - 1}.ffn.route_margin"]) == text.sliding_window
        alone[seed] = played.rows(0)
    for _ in range(4):
        scenario = [Arrival(text_tokens(name, seed, LENGTH), LENGTH, rng.randrange(4)) for seed in alone]
        poison(runner)
        budgets = [rng.choice([1, 5, 6, 7, 17, 31, 64]) for _ in range(5)]
        played = play(runner, scenario, cycle(budgets), rng.randrange(99), logits="kept")
        for seed, (positions, rows) in alone.items():
            assert positions == list(range(LENGTH - text.sliding_window, LENGTH))
            found, logits = played.rows(seed)
            assert found == positions
            assert ((logits - rows).norm(dim=1) <= TOLERANCE * rows.norm(dim=1)).all()


def test_decode_behind_a_bounded_prompt_does_not_depend_on_chunks() -> None:
    runner = runner_of("tiny-a", replay="bounded")
    ids = text_tokens("tiny-a", 0, LENGTH)
    positions, rows = kept_alone(runner, ids, 61)
    assert positions == list(range(61 - 16, LENGTH))
    for budget in (7, 45):
        poison(runner)
        found, logits = play(runner, [Arrival(ids, 61)], repeat(budget), budget, logits="kept").rows(0)
        assert found == positions
        assert ((logits - rows).norm(dim=1) <= TOLERANCE * rows.norm(dim=1)).all()


class Counting:
    """An MoE operator that notes the rows of each call."""

    def __init__(self, operator: Any, rows: list[int]) -> None:
        self.operator = operator
        self.rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)

    def run(self, x: Tensor, *args: Any) -> Tensor:
        self.rows.append(len(x))
        result: Tensor = self.operator.run(x, *args)
        return result


def rows_per_layer(monkeypatch: pytest.MonkeyPatch, replay: str, logits: LogitsKind, budget: int) -> list[list[int]]:
    """For each layer the rows of every call while a prompt of 90 tokens runs."""
    runner = runner_of("tiny-a", replay=replay)
    layers: list[list[int]] = [[] for _ in runner.model.blocks]
    with monkeypatch.context() as patch:
        for block, rows in zip(runner.model.blocks, layers, strict=True):
            for phase, operator in list(block.moe.items()):
                patch.setitem(block.moe, phase, Counting(operator, rows))
        poison(runner)
        play(runner, [Arrival(text_tokens("tiny-a", 0, LENGTH), LENGTH)], repeat(budget), logits=logits)
    return layers


def test_chunks_in_front_of_the_last_window_skip_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers 0-4 run every row; layers 5-8 the last 16 only, 6 of which lie in the last but one chunk of 20."""
    encoder, decoder = [20, 20, 20, 20, 10], [6, 10]
    kinds: tuple[LogitsKind, ...] = ("last", "kept")
    for logits in kinds:
        layers = rows_per_layer(monkeypatch, "bounded", logits, 20)
        assert layers[:5] == [encoder] * 5
        assert [[n for n in rows if n] for rows in layers[5:]] == [decoder] * 4
        assert all(len(rows) == 2 for rows in layers[6:]), "a chunk without kept rows still calls later layers"


def test_all_logits_run_all_rows_in_bounded_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_per_layer(monkeypatch, "bounded", "all", 20) == [[20, 20, 20, 20, 10]] * 9
    assert rows_per_layer(monkeypatch, "full", "last", 20) == [[20, 20, 20, 20, 10]] * 9


def test_all_logits_in_bounded_replay_are_those_of_full_replay() -> None:
    runner = runner_of("tiny-a", replay="bounded")
    poison(runner)
    _, rows = play(runner, [Arrival(text_tokens("tiny-a", 1, LENGTH), LENGTH)], repeat(LENGTH)).rows(0)
    assert torch.equal(rows, reference("tiny-a", 1)[0])
