"""The output side of a request against an oracle that sees everything at once: scripted tokens, any way of stopping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.runtime.generation import Generation
from minideepinfer.runtime.outputs import Chunk, RequestOutput
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.tokenizer import Tokenizer

EOS = 0
VOCABULARY = [b"", b"a", b"b", b"ab", b"ba", b"c", b"\xe2", b"\x82", b"\xac", "€".encode(), b"aab", b"x"]
SPARE = len(VOCABULARY) - 1
"""Second choice of every step; never forbidden here."""


class Letters(Tokenizer):
    """Tokens of one to three letters, and the single bytes of a character."""

    def __init__(self) -> None:
        super().__init__(None)

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(VOCABULARY[i] for i in token_ids).decode("utf-8", "replace")


def start(params: SamplingParams, prompt: int = 2) -> Generation:
    return Generation(Request(0, [SPARE] * prompt, prompt, prompt + params.max_tokens), params, Letters(), EOS)


def push(generation: Generation, favourite: int) -> Chunk:
    """One step, in which a token is the most likely one."""
    logits = torch.zeros(1, len(VOCABULARY))
    logits[0, SPARE], logits[0, favourite] = 1.0, 2.0
    position = len(generation.request.token_ids) - 1
    generation.accept(range(position, position + 1), logits)
    return generation.chunks.popleft()


@given(st.data())
def test_a_fork_has_all_that_was_produced_and_goes_on_alike(data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.sampled_from(["ab", "ba", "aab", "ca", "€", "x"]), max_size=2))
    params = SamplingParams(max_tokens=9, stop=tuple(stops), logprobs=1, stop_token_ids=(5,), min_tokens=2)
    script = data.draw(st.lists(st.integers(0, SPARE), min_size=9, max_size=9))
    at = data.draw(st.integers(0, 8))
    generation, other = start(params), None
    expected: list[Chunk] = []
    for number, favourite in enumerate(script):
        if number == at and generation.finish_reason is None:
            other = generation.fork(generation.request.twin(1), 3)
            assert not other.chunks and other.params.seed == 3
        if generation.finish_reason is None:
            expected.append(push(generation, favourite))
    if other is not None:
        assert (other.finish_reason, other.token_ids) == (None, generation.token_ids[:at]), "the first one is not it"
        assert [push(other, favourite) for favourite in script[at : len(expected)]] == expected[at:]
        assert other.output() == generation.output()
        assert len(other.output().logprobs or []) == other.num_tokens


def play(params: SamplingParams, script: list[int]) -> tuple[list[Chunk], RequestOutput]:
    """Feed a script until the generation ends; the spare token where the script is over."""
    generation, chunks = start(params), []
    favourites = iter(script)
    while generation.finish_reason is None:
        chunks.append(push(generation, next(favourites, SPARE)))
    assert not generation.chunks
    return chunks, generation.output()


def oracle(params: SamplingParams, script: list[int]) -> tuple[list[int], str, str]:
    """Ids, text and finish reason by the rules of `SamplingParams`, from the whole text at every step."""
    enders = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    ids: list[int] = []
    before = ""
    while True:
        token = script[len(ids)] if len(ids) < len(script) else SPARE
        if token in enders:
            if len(ids) >= params.min_tokens:
                return [*ids, token], Letters().decode(ids), "stop"
            token = SPARE
        ids.append(token)
        last = len(ids) == params.max_tokens
        text = Letters().decode(ids)
        if text.endswith("\ufffd") and not last:
            text = before
        if len(ids) >= params.min_tokens:
            begins = [at for stop in params.stop for at in range(len(text)) if text.startswith(stop, at)
                      and at + len(stop) > len(before)]  # fmt: skip
            if begins:
                return ids, text[: min(begins)], "stop"
        if last:
            return ids, text, "length"
        before = text


@st.composite
def ways_to_stop(draw: st.DrawFn) -> SamplingParams:
    most = draw(st.integers(1, 10))
    return SamplingParams(
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)),
        stop=draw(st.lists(st.text("abc€", min_size=1, max_size=4), max_size=3)),
        stop_token_ids=draw(st.lists(st.integers(0, SPARE - 1), max_size=2)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    )


@given(ways_to_stop(), st.lists(st.integers(0, SPARE - 1), max_size=10))
def test_any_script_ends_as_the_rules_say_and_a_stream_adds_up(params: SamplingParams, script: list[int]) -> None:
    chunks, output = play(params, script)
    ids, text, reason = oracle(params, script)
    assert (output.token_ids, output.text, output.finish_reason) == (ids, text, reason)
    assert [chunk.token_ids for chunk in chunks] == [[i] for i in ids]
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(ids) - 1) + [reason]
    assert (output.num_prompt_tokens, output.num_generated_tokens) == (2, len(ids))
    if params.logprobs is None:
        assert output.logprobs is None
        assert all(chunk.logprobs is None for chunk in chunks)
    else:
        assert output.logprobs == [entry for chunk in chunks for entry in chunk.logprobs or []]
        assert [next(iter(entry)) for entry in output.logprobs] == ids


@given(ways_to_stop(), st.lists(st.integers(1, SPARE - 1), max_size=10), st.integers(0, 9))
def test_giving_up_shows_what_came_and_takes_nothing_back(params: SamplingParams, script: list[int], at: int) -> None:
    generation, shown = start(params), ""
    for favourite in script[:at]:
        if generation.finish_reason is None:
            shown += push(generation, favourite).text
    if generation.finish_reason is not None:
        return
    generation.abort()
    output = generation.output()
    assert output.finish_reason == "abort"
    assert output.text == shown + generation.chunks.popleft().text == Letters().decode(output.token_ids)


@pytest.mark.parametrize(
    ("params", "script", "expected"),
    [
        ({"stop": "abc"}, [1, 2, 5, 5], ([1, 2, 5], "", "stop")),
        ({"stop": "bc"}, [3, 5], ([3, 5], "a", "stop")),
        ({"stop": "b", "min_tokens": 2}, [2, 1, 2], ([2, 1, 2], "ba", "stop")),
        ({"stop": "aab", "min_tokens": 2}, [1, 3], ([1, 3], "", "stop")),
        ({"stop": "€"}, [1, 6, 7, 8, 1], ([1, 6, 7, 8], "a", "stop")),
        ({"stop": "bbb", "max_tokens": 3}, [1, 2, 2], ([1, 2, 2], "abb", "length")),
        ({"max_tokens": 2}, [1, 6], ([1, 6], "a\ufffd", "length")),
        ({}, [1, 6, EOS], ([1, 6, EOS], "a\ufffd", "stop")),
        ({"stop": "ab"}, [1, EOS], ([1, EOS], "a", "stop")),
        ({"max_tokens": 1}, [EOS], ([EOS], "", "stop")),
        ({"max_tokens": 2, "ignore_eos": True}, [EOS, 1], ([EOS, 1], "a", "length")),
        ({"max_tokens": 2, "ignore_eos": True, "stop_token_ids": [EOS]}, [EOS, 1], ([EOS], "", "stop")),
        ({"stop_token_ids": [1], "min_tokens": 1}, [1, 1], ([SPARE, 1], "x", "stop")),
    ],
)
def test_corners(params: dict[str, Any], script: list[int], expected: tuple[list[int], str, str]) -> None:
    output = play(SamplingParams(**params), script)[1]
    assert (output.token_ids, output.text, output.finish_reason) == expected
    assert oracle(SamplingParams(**params), script) == expected


def test_prompt_rows_are_scored_in_whatever_pieces_they_come() -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    logits = torch.randn(5, len(VOCABULARY), generator=torch.Generator().manual_seed(0))
    exact = logits.log_softmax(-1)
    for cut in range(6):
        generation = start(params, prompt=5)
        for piece in (range(cut), range(cut, 5)):
            generation.accept(piece, logits[piece.start : piece.stop])
        first, *others = generation.output().prompt_logprobs or []
        assert first is None
        for row, entry in zip(exact[:4], others, strict=True):
            assert entry is not None
            assert set(entry) == {SPARE, int(row.argmax())}
            assert entry[SPARE] == pytest.approx(float(row[SPARE]), abs=1e-6)
        assert len(others) == 4
        assert generation.output().token_ids == [int(logits[4].argmax())]
