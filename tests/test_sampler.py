"""From logits to tokens, and what sampling parameters are refused."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.errors import MiniDeepInferError, RequestError
from minideepinfer.runtime.generation import StopText
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.sampler import Sampler, log_probabilities

finite = st.floats(-30, 30, width=32)
rows = st.lists(finite, min_size=1, max_size=12).map(torch.tensor)


def draws(logits: torch.Tensor, number: int, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler.sample(logits) for _ in range(number)]


@given(st.integers(0, 20), st.integers(0, 9), st.sampled_from([0.0, 0.7]))
def test_draws_that_were_made_are_left_out(number: int, seed: int, temperature: float) -> None:
    logits = torch.linspace(-1, 1, 50)
    params = SamplingParams(seed=seed, temperature=temperature)
    later = Sampler(params, num_drawn=number)
    assert [later.sample(logits) for _ in range(5)] == draws(logits, number + 5, **params.model_dump())[number:]


def test_seeds_of_continuations() -> None:
    assert SamplingParams(n=3, seed=7).seeds == [7, 8, 9]
    assert SamplingParams(n=2).seeds == [None, None]
    assert SamplingParams(n=3, seed=7, stop="a", max_tokens=9).seeded(1) == SamplingParams(
        seed=1, stop="a", max_tokens=9
    )
    assert SamplingParams(n=2, seed=2**63 - 2).seeds[-1] == 2**63 - 1
    with pytest.raises(RequestError, match="leaves no seeds for n = 3 continuations"):
        SamplingParams(n=3, seed=2**63 - 2)
    with pytest.raises(RequestError, match="n: "):
        SamplingParams(n=0)


def test_greedy_takes_the_lower_id_among_ties() -> None:
    assert draws(torch.tensor([1.0, 3.0, 3.0, -1.0]), 2) == [1, 1]


@given(rows, st.integers(0, 5), st.floats(0.05, 1.0), st.floats(0.1, 3.0), st.integers(0, 99))
def test_only_tokens_that_the_filters_keep_are_drawn(
    logits: torch.Tensor, top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[: top_k or None]
    weights = [math.exp((float(logits[i]) - float(logits[order[0]])) / temperature) for i in order]
    allowed, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p * sum(weights) * (1 + 1e-9):
            break
        allowed.append(token)
        mass += weight
    drawn = draws(logits, 5, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    assert set(drawn) <= set(allowed)


def test_frequencies_follow_the_tempered_distribution() -> None:
    logits, number = torch.tensor([0.0, 1.0, 2.0, -40.0]), 4000
    counts = Counter(draws(logits, number, temperature=2.0, seed=1))
    expected = (logits.double() / 2).softmax(0)
    for token, probability in enumerate(expected.tolist()):
        deviation = math.sqrt(number * probability * (1 - probability))
        assert abs(counts[token] - number * probability) <= 4 * deviation + 1e-3


def test_top_k_and_top_p_cut_where_they_say() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert set(draws(logits, 300, temperature=1.0, top_k=2, seed=0)) == {1, 3}
    assert set(draws(logits, 300, temperature=1.0, top_p=0.65, seed=0)) == {1, 3}
    assert set(draws(logits, 300, temperature=1.0, top_p=0.75, seed=0)) == {1, 2, 3}
    # top_p counts what top_k left: 0.4 of 0.7 is 0.57.
    assert set(draws(logits, 300, temperature=1.0, top_k=2, top_p=0.5, seed=0)) == {1}
    assert set(draws(logits, 300, temperature=1.0, top_p=1e-9, seed=0)) == {1}


def test_ties_at_the_top_k_cut_keep_the_lower_ids() -> None:
    assert set(draws(torch.zeros(5), 200, temperature=1.0, top_k=2, seed=3)) == {0, 1}


def test_a_tiny_temperature_is_greedy_and_not_nan() -> None:
    assert draws(torch.tensor([1.0, 2.0, 1.5]), 20, temperature=1e-300, seed=0) == [1] * 20


def test_the_same_seed_gives_the_same_draws_whatever_else_draws() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    alone = draws(logits, 20, temperature=1.0, seed=7)
    first, other = Sampler(SamplingParams(temperature=1.0, seed=7)), Sampler(SamplingParams(temperature=1.0, seed=8))
    between = []
    for _ in range(20):
        between.append(first.sample(logits))
        other.sample(logits)
        torch.rand(3)
    assert between == alone
    assert draws(logits, 20, temperature=1.0, seed=8) != alone
    assert draws(logits, 20, temperature=1.0) != draws(logits, 20, temperature=1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_never_come_and_the_logits_stay(temperature: float) -> None:
    logits = torch.tensor([5.0, 9.0, 1.0])
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    assert {sampler.sample(logits, forbidden=(1, 0)) for _ in range(50)} == {2}
    assert logits.tolist() == [5.0, 9.0, 1.0]


@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_broken_logits_are_an_error_not_a_token(bad: list[float]) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(MiniDeepInferError, match="the largest logit is"):
            Sampler(SamplingParams(temperature=temperature)).sample(torch.tensor(bad))


@given(rows, st.data(), st.integers(0, 20))
def test_log_probabilities_are_of_the_raw_distribution(logits: torch.Tensor, data: st.DataObject, count: int) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    reported = log_probabilities(logits, token, count)
    exact = logits.double().log_softmax(0)
    assert next(iter(reported)) == token
    best = sorted((float(v) for v in exact), reverse=True)[:count]
    others = [value for other, value in reported.items() if other != token]
    assert others == sorted(others, reverse=True)
    assert len(reported) in (len(best), len(best) + 1)
    assert sorted(reported.values(), reverse=True)[: len(best)] == pytest.approx(best, abs=2e-5)
    assert all(value == pytest.approx(float(exact[i]), abs=2e-5) for i, value in reported.items())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens 4 exceeds max_tokens 3"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "empty stop string"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": "2"}, "prompt_logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n: .* less than or equal to 4096"),
        ({"best_of": 2}, "best_of: unknown key"),
    ],
)
def test_impossible_parameters_are_refused_by_name(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=rf"sampling parameters: .*{message}"):
        SamplingParams(**bad)


def test_defaults_and_single_values() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3, 4])
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (64, 0.0, 1.0, 0)
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 4)


pieces = st.lists(st.text("abc", max_size=3), max_size=10)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(pieces, stops)
def test_stop_strings_cut_at_the_first_that_completes_and_nothing_is_taken_back(
    pieces: list[str], stops: list[str]
) -> None:
    text, shown, cut, whole = StopText(stops), "", False, ""
    for piece in pieces:
        whole += piece
        addition, cut = text.push(piece, may_stop=True)
        shown += addition
        assert whole.startswith(shown)
        found = [at for at in map(whole.find, stops) if at >= 0]
        assert cut == bool(found)
        if cut:
            assert shown == whole[: min(found)]
            break
    if not cut:
        shown += text.flush()
        assert shown == whole
    assert text.shown == shown


def test_what_may_become_a_stop_string_is_held_back() -> None:
    text = StopText(["STOP", "PX"])
    assert text.push("go ST", may_stop=True) == ("go ", False)
    assert text.push("O", may_stop=True) == ("", False)
    assert text.push("Q P", may_stop=True) == ("STOQ ", False)
    assert text.push("X and more", may_stop=True) == ("", True)
    assert text.shown == "go STOQ "


def test_a_stop_string_that_completed_too_early_does_not_count_later() -> None:
    text = StopText(["ab", "xabc"])
    assert text.push("xab", may_stop=False)[1] is False
    assert text.push("d", may_stop=True)[1] is False
    assert text.push(" ab", may_stop=True)[1] is True
    assert text.shown == "xabd "
