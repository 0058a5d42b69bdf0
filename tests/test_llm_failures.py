"""What goes wrong in the middle leaves nothing behind, and requests that share the engine do not disturb each other."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from minideepinfer import LLM, ConfigError, EngineConfig, MiniDeepInferError, RequestError, SamplingParams

SQLITE = json.loads((Path(__file__).parent / "data/trained/golden.json").read_text())["greedy"]["sqlite3-open"]
PROMPT, CONTINUATION = SQLITE["prompt_ids"], SQLITE["new_ids"]
EXACT: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_quantization": "none"}
FOUR = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def loaded() -> Iterator[LLM]:
    """Five rows a step, two requests at a time, six pages."""
    config = EngineConfig(**EXACT, max_tokens_per_step=5, cache={"num_pages": 6, "page_tokens": 16, "max_requests": 2})
    with LLM("tiny", config) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    yield loaded
    assert_nothing_is_held(loaded)
    assert loaded.generate(PROMPT, FOUR)[0].token_ids == CONTINUATION[:4], "it still works, and as before"


def assert_nothing_is_held(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert scheduler.running == scheduler.waiting == ()
    assert scheduler.pages.num_free == 6
    assert scheduler.num_free_rings == 2
    assert llm.engine._generations == {}


class Failing:
    """Passes calls of an operator on, until the one that fails."""

    def __init__(self, operator: Any, error: BaseException, after: int) -> None:
        self.operator = operator
        self.error = error
        self.calls_left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise self.error
        return self.operator.run(*args, **kwargs)


@pytest.mark.parametrize("error", [ValueError("no tile fits"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("call", ["forward", "generate", "stream"])
def test_an_operator_that_fails_leaves_the_engine_empty_and_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, call: str, after: int, error: BaseException
) -> None:
    moe = llm.engine.runner.model.blocks[6].moe
    for phase, operator in dict(moe).items():
        monkeypatch.setitem(moe, phase, Failing(operator, error, after))
    with pytest.raises(type(error)):
        if call == "forward":
            llm.forward([PROMPT * 3, PROMPT, PROMPT])
        elif call == "generate":
            llm.generate([PROMPT * 3, PROMPT, PROMPT], SamplingParams(max_tokens=8))
        else:
            list(llm.stream(PROMPT, SamplingParams(max_tokens=8)))
    assert_nothing_is_held(llm)
    monkeypatch.undo()


def test_a_waiting_stream_outlives_the_failure_of_those_that_ran(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [llm.stream(PROMPT, FOUR) for _ in range(3)]
    next(streams[0])
    next(streams[1])
    llm.engine.start(waiting := llm._generation(PROMPT, FOUR))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "logits", fail)
        with pytest.raises(ZeroDivisionError):
            llm.forward([PROMPT])
    assert waiting.finish_reason is None
    assert [chunk.finish_reason for chunk in streams[0]][-1] == "abort"
    assert [token for chunk in streams[2] for token in chunk.token_ids] == CONTINUATION[:4]
    assert waiting.output().token_ids == CONTINUATION[:4]
    assert [chunk.finish_reason for chunk in streams[1]][-1] == "abort"


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_interleaved_streams_are_each_as_if_alone(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=9, temperature=0.9, seed=seed) for seed in range(4)]
    alone = [llm.generate(PROMPT[: 4 + i], p)[0] for i, p in enumerate(params)]
    streams = [llm.stream(PROMPT[: 4 + i], p) for i, p in enumerate(params)]
    ids: list[list[int]] = [[] for _ in streams]
    texts = ["" for _ in streams]
    pending = dict(enumerate(streams))
    while pending:
        for i, stream in list(pending.items()):
            chunk = next(stream, None)
            if chunk is None:
                del pending[i]
            else:
                ids[i] += chunk.token_ids
                texts[i] += chunk.text
    assert ids == [output.token_ids for output in alone]
    assert texts == [output.text for output in alone]
    assert len({tuple(x) for x in ids}) > 1


def test_a_stream_closed_half_way_makes_room_for_those_that_wait(llm: LLM) -> None:
    first, second, third = (llm.stream(PROMPT, SamplingParams(max_tokens=20)) for _ in range(3))
    next(first)
    next(second)
    assert [r.ring is not None for r in llm.engine.scheduler.running] == [True, True]
    first.close()
    assert (llm.engine.scheduler.num_free_rings, llm.engine.scheduler.pages.num_free) == (1, 4)
    assert next(third).token_ids == CONTINUATION[:1]
    del second
    gc.collect()
    assert len(llm.engine.scheduler.running) == 1, "a forgotten stream is given up as well"
    third.close()


def test_a_stream_never_started_holds_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, FOUR)
    assert_nothing_is_held(llm)
    stream.close()


def test_forward_runs_beside_an_open_stream(llm: LLM) -> None:
    alone = llm.forward([PROMPT * 2])[0]
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=12))
    ids = list(next(stream).token_ids)
    beside, other = llm.forward([PROMPT * 2, PROMPT])
    assert float((beside - alone).norm() / alone.norm()) < 1e-5
    assert len(other) == len(PROMPT)
    assert ids + [token for chunk in stream for token in chunk.token_ids] == CONTINUATION[:12]


def test_a_stream_refuses_what_its_chunks_do_not_carry(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs come with generate"):
        llm.stream(PROMPT, SamplingParams(prompt_logprobs=1))


def test_a_request_that_no_token_may_continue_is_refused_before_it_runs(llm: LLM) -> None:
    every = SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=list(range(2048)))
    with pytest.raises(RequestError, match="prompt 1: min_tokens is 1, but every token ends the generation"):
        llm.generate([PROMPT, PROMPT], [FOUR, every])
    assert llm.generate(PROMPT, every.model_copy(update={"min_tokens": 0}))[0].token_ids == CONTINUATION[:1]


def test_any_kind_of_integer_is_an_id(llm: LLM) -> None:
    prompts = [list(np.array(PROMPT)), tuple(PROMPT), list(torch.tensor(PROMPT)), np.array(PROMPT, np.uint16).tolist()]
    assert {tuple(output.token_ids) for output in llm.generate(prompts, FOUR)} == {tuple(CONTINUATION[:4])}
    assert llm.generate(prompts[0], FOUR)[0].token_ids == CONTINUATION[:4]
    assert type(llm._generation(prompts[0], FOUR).request.token_ids[0]) is int


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([PROMPT, [0, 2048]], r"prompt 1: token 1 of the prompt is 2048"),
        ([PROMPT, PROMPT, []], r"prompt 2: .*at least one prompt token"),
        ([PROMPT, 7], r"prompt 1: a prompt is a int"),
        ([0, None], r"prompt 0: token 1 of the prompt is None"),
        ([0, np.bool_(True)], r"token 1 of the prompt is (np\.)?True"),
        ([0, 2.5], r"token 1 of the prompt is 2\.5"),
        ([0, 2**70], r"token 1 of the prompt is 1180591620717411303424"),
        (["fine", "\ud800"], r"prompt 1: the text prompt is not Unicode \(surrogates not allowed at character 0\)"),
        ({0: 1}, r"prompts is a dict"),
        (np.array([1, 2]), r"prompts is a ndarray"),
    ],
)
def test_a_refusal_names_the_prompt(llm: LLM, bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(bad, FOUR)
    assert_nothing_is_held(llm)


def test_a_refusal_names_the_sequence(llm: LLM) -> None:
    with pytest.raises(RequestError, match="sequence 1: token 0 of the prompt is -1"):
        llm.forward([PROMPT, [-1]])
    with pytest.raises(
        RequestError, match=r"sequence 1: .*needs 7 pages of 16 tokens for its 97 tokens, the pool has 6"
    ):
        llm.forward([PROMPT, [5] * 97])


def test_a_config_that_is_no_engine_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="config is a dict; an EngineConfig is needed"):
        LLM("tiny", {"dtype": "float32"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"page_tokens": 3}, r"cache\.page_tokens: 3 is no multiple of 2, which layer 2 needs"),
        ({"page_tokens": 12}, r"cache\.page_tokens: 12 is no multiple of 8, which layer 5 needs"),
        ({"num_pages": 10**9}, r"cache: 1000000000 pages of 64 tokens and 16 window rings cannot be allocated on cpu"),
        ({"max_requests": 10**9}, r"1000000000 window rings cannot be allocated on cpu; lower cache\.num_pages or"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(cache: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", EngineConfig(**EXACT, cache=cache))


def test_an_open_stream_does_not_keep_a_closed_model_alive() -> None:
    with LLM("tiny", EngineConfig(**EXACT)) as llm:
        model = weakref.ref(llm.engine.runner.model)
        stream = llm.stream(PROMPT)
        next(stream)
    assert model() is None
    with pytest.raises(MiniDeepInferError, match="this LLM was closed"):
        next(stream)
    assert next(stream, None) is None
