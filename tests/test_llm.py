"""The Python API on the packaged checkpoint: forward, generate, stream, and what is refused."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minideepinfer
import pytest
import torch
from minideepinfer import LLM, EngineConfig, MiniDeepInferError, RequestError, SamplingParams
from minideepinfer.runtime.outputs import RequestOutput
from minideepinfer.runtime.sampler import Sampler
from safetensors import safe_open

DATA = Path(__file__).parent / "data" / "trained"
RECORDED = json.loads((DATA / "golden.json").read_text())
SQLITE = RECORDED["greedy"]["sqlite3-open"]
PROMPT, CONTINUATION = SQLITE["prompt_ids"], SQLITE["new_ids"]
EXACT: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_quantization": "none"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", EngineConfig(**EXACT)) as llm:
        yield llm


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """Seven rows a step, two requests at a time, four pages."""
    config = EngineConfig(**EXACT, max_tokens_per_step=7, cache={"num_pages": 4, "max_requests": 2})
    with LLM("tiny", config) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM, small: LLM) -> Iterator[None]:
    yield
    for scheduler in (llm.engine.scheduler, small.engine.scheduler):
        assert scheduler.running == scheduler.waiting == scheduler.pending_forks == ()
        assert scheduler.pages.num_free == scheduler.pages.num_pages


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_forward_gives_logits_of_every_position(llm: LLM) -> None:
    logits = llm.forward([PROMPT, [0], PROMPT[:5]])
    assert [tuple(x.shape) for x in logits] == [(8, 2048), (1, 2048), (5, 2048)]
    assert all(x.dtype is torch.float32 and x.device.type == "cpu" for x in logits)
    assert int(logits[0][-1].argmax()) == CONTINUATION[0]
    assert distance(logits[2], logits[0][:5]) < 1e-5
    assert llm.forward([]) == []


def test_forward_is_the_same_in_chunks_and_token_by_token(llm: LLM, small: LLM) -> None:
    ids = [*PROMPT, *CONTINUATION[:30]]
    whole = llm.forward([ids])[0]
    assert distance(small.forward([ids])[0], whole) < 1e-5
    decoded = llm.forward([ids, ids], num_prompt_tokens=[20, 1])
    assert all(distance(x, whole) < 1e-5 for x in decoded)


def test_forward_captures_by_pattern_across_chunks(llm: LLM, small: LLM) -> None:
    names = {f"layers.{layer}.attn.out" for layer in range(10)} | {"final.normed"}
    logits, captured = llm.forward([PROMPT, PROMPT[:3]], capture=["layers.*.attn.out", "final.normed"])
    assert [x.shape[0] for x in logits] == [8, 3]
    assert [set(tensors) for tensors in captured] == [names, names]
    assert {tuple(x.shape) for x in captured[1].values()} == {(3, 192)}
    _, chunked = small.forward([PROMPT], capture=["layers.*.attn.out"])
    for name, tensor in chunked[0].items():
        assert distance(tensor, captured[0][name]) < 1e-5


def test_kept_logits_are_the_last_window_of_the_prompt_and_all_behind_it() -> None:
    ids = RECORDED["snippets"]["kjv-217"]["ids"][:60]
    with LLM("tiny", EngineConfig(**EXACT, replay="bounded")) as llm:
        kept = llm.forward([ids], num_prompt_tokens=[50], logits="kept")[0]
        assert kept.shape == (32 + 10, 2048)
        whole = llm.forward([ids])[0]
    assert whole.shape == (60, 2048)
    assert int((kept.argmax(-1) == whole[18:].argmax(-1)).sum()) >= 40
    assert distance(kept, whole[18:]) > 1e-5, "bounded replay is an approximation"


def test_full_replay_keeps_all_logits_whatever_is_known_of_the_prompt() -> None:
    """Behind a prefix hit some rows would be missing, and others have run with windows that are cut off."""
    ids = (PROMPT * 60)[:400]
    with LLM("tiny", EngineConfig(**EXACT, cache={"prefix": True, "page_tokens": 8})) as llm:
        cold = llm.forward([ids], logits="kept")[0]
        assert cold.shape == (400, 2048)
        llm.generate(ids, SamplingParams(max_tokens=1))
        assert torch.equal(llm.forward([ids], logits="kept")[0], cold)


def test_greedy_continuations_are_the_recorded_ones(llm: LLM) -> None:
    recorded = list(RECORDED["greedy"].values())
    outputs = llm.generate([r["prompt_ids"] for r in recorded], SamplingParams(max_tokens=64))
    for output, want in zip(outputs, recorded, strict=True):
        assert output.token_ids == want["new_ids"]
        assert output.text == want["new_text"]
        assert output.finish_reason == "length"
        assert (output.num_prompt_tokens, output.num_generated_tokens) == (len(want["prompt_ids"]), 64)
        assert output.logprobs is output.prompt_logprobs is None


def test_prompt_log_probabilities_are_the_recorded_ones(llm: LLM) -> None:
    ids = RECORDED["snippets"]["kjv-217"]["ids"]
    with safe_open(DATA / "golden.safetensors", "pt") as golden:
        want = golden.get_tensor("kjv-217.fp32-noq.logprob")
    output = llm.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    got = torch.tensor([entry[token] for entry, token in zip(others, ids[1:], strict=True)])
    assert (got - want).abs().max() < 1e-4


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    by_text, by_ids = llm.generate([SQLITE["prompt_text"], PROMPT], params)
    assert by_text == by_ids
    assert llm.generate(SQLITE["prompt_text"], params) == [by_text]
    assert llm.generate(PROMPT, params) == [by_text]
    assert llm.generate([]) == []


def test_log_probabilities_name_the_token_first_then_the_best(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=1.5, seed=5, logprobs=2, prompt_logprobs=1)
    output = llm.generate(PROMPT, params)[0]
    exact = llm.forward([PROMPT + output.token_ids])[0].log_softmax(-1)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(output.logprobs) == 3
    assert len(output.prompt_logprobs) == len(PROMPT)
    for step, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = exact[len(PROMPT) - 1 + step]
        assert next(iter(entry)) == token
        assert set(entry) == {token, *row.topk(2).indices.tolist()}
        assert entry == pytest.approx({i: float(row[i]) for i in entry}, abs=1e-4)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert set(entry) == {PROMPT[position], int(exact[position - 1].argmax())}


def test_a_stop_id_ends_and_min_tokens_forbids_it(llm: LLM) -> None:
    stop = CONTINUATION[3]
    ended = llm.generate(PROMPT, SamplingParams(stop_token_ids=[stop]))[0]
    assert ended.token_ids == CONTINUATION[:4]
    assert ended.finish_reason == "stop"
    assert ended.text == llm.engine.runner.tokenizer.decode(CONTINUATION[:3])
    later = llm.generate(PROMPT, SamplingParams(stop_token_ids=[stop], min_tokens=6, max_tokens=6))[0]
    assert later.token_ids[:3] == CONTINUATION[:3]
    assert stop not in later.token_ids
    assert later.num_generated_tokens == 6


def test_the_end_token_ends_unless_it_is_ignored(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine.runner
    monkeypatch.setattr(runner, "config", runner.config.model_copy(update={"eos_token_id": CONTINUATION[2]}))
    params = {"max_tokens": 5}
    outputs = llm.generate([PROMPT] * 2, [SamplingParams(**params), SamplingParams(**params, ignore_eos=True)])
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [
        (CONTINUATION[:3], "stop"),
        (CONTINUATION[:5], "length"),
    ]


@pytest.mark.parametrize("stop", ["to open the", "n the data", " used", "file using sqlite3", "i"])
def test_stop_strings_cut_the_text_across_tokens_and_streams_never_show_them(llm: LLM, stop: str) -> None:
    params = SamplingParams(stop=["never in it", stop])
    output = llm.generate(PROMPT, params)[0]
    assert output.finish_reason == "stop"
    assert output.text == SQLITE["new_text"][: SQLITE["new_text"].index(stop)]
    assert stop in llm.engine.runner.tokenizer.decode(output.token_ids)
    assert stop not in llm.engine.runner.tokenizer.decode(output.token_ids[:-1])
    assert streamed(llm, params) == output


def streamed(llm: LLM, params: SamplingParams) -> RequestOutput:
    """What a stream's chunks add up to."""
    chunks = list(llm.stream(PROMPT, params))
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert chunks[-1].finish_reason is not None
    ids = [token for chunk in chunks for token in chunk.token_ids]
    asked = params.logprobs is not None
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or []] if asked else None
    text = "".join(chunk.text for chunk in chunks)
    return RequestOutput(ids, text, chunks[-1].finish_reason, logprobs, None, len(PROMPT), len(ids))


def test_a_stream_adds_up_to_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3, logprobs=1)
    assert streamed(llm, params) == llm.generate(PROMPT, params)[0]


def test_a_stream_that_is_closed_frees_what_it_held(llm: LLM) -> None:
    stream = llm.stream(PROMPT)
    assert next(stream).token_ids == CONTINUATION[:1]
    assert len(llm.engine.scheduler.running) == 1
    stream.close()
    assert llm.engine.scheduler.running == ()


def test_requests_join_while_others_run_and_change_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=11)
    alone = llm.generate(PROMPT, params)[0].token_ids
    stream = llm.stream(PROMPT, params)
    ids = list(next(stream).token_ids)
    beside, greedy = llm.generate([PROMPT, PROMPT], [params, SamplingParams(max_tokens=3)])
    assert len(llm.engine.scheduler.running) <= 1
    ids += [token for chunk in stream for token in chunk.token_ids]
    assert ids == beside.token_ids == alone
    assert greedy.token_ids == CONTINUATION[:3]


def test_requests_queue_for_pages_and_rings(llm: LLM, small: LLM) -> None:
    # The long ones need two of the four pages, two requests run at a time, prompts run in chunks of seven.
    long = RECORDED["snippets"]["kjv-217"]["ids"][:62]
    prompts, params = [long, PROMPT, long, PROMPT, long], SamplingParams(max_tokens=4)
    outputs = small.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [llm.generate(prompt, params)[0].token_ids for prompt in prompts]


BAD_PROMPTS = [
    ([0, 2048], r"token 1 of the prompt is 2048; ids are integers 0\.\.2047"),
    ([0, -1], r"token 1 of the prompt is -1"),
    ([0, 4, 5], r"token 1 of the prompt is the image token 4"),
    ("see <|image|>", r"is the image token 4"),
    ([0, "a"], r"token 1 of the prompt is 'a'"),
    ([0, True], r"token 1 of the prompt is True"),
    ([0, 1.0], r"token 1 of the prompt is 1\.0"),
    ([], r"at least one prompt token"),
    (5, r"a prompt is a int"),
    (b"abc", r"a prompt is a bytes"),
    (None, r"a prompt is a NoneType"),
    ([5] * 1025, r"needs 1027 positions \(1025 given, 2 to come\), the model has 1024"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_PROMPTS)
def test_one_bad_prompt_leaves_nothing_queued(llm: LLM, bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT, bad, PROMPT], SamplingParams(max_tokens=3))
    assert llm.engine.scheduler.waiting == ()
    if not isinstance(bad, str):
        with pytest.raises(RequestError, match=message.partition(r" \(")[0].replace("1027", "1025")):
            llm.forward([PROMPT, bad])


def test_a_request_that_exceeds_the_pool_is_refused_with_the_numbers(small: LLM) -> None:
    with pytest.raises(RequestError, match=r"needs 5 pages of 64 tokens for its 257 tokens, the pool has 4"):
        small.generate([[5] * 100], SamplingParams(max_tokens=158))
    assert small.generate([[5] * 255], SamplingParams(max_tokens=2))[0].num_generated_tokens == 2


def test_the_last_position_can_be_used(llm: LLM) -> None:
    output = llm.generate([5] * 1024, SamplingParams(max_tokens=1))[0]
    assert (output.num_prompt_tokens, output.num_generated_tokens) == (1024, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(7), "prompts is a int"),
        (lambda llm: llm.generate("a", 7), "params is a int"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "params is a dict"),
        (lambda llm: llm.generate(["a", "b"], [SamplingParams()]), "1 sampling parameters were given for 2 prompts"),
        (lambda llm: llm.generate(["a"], [3]), "params is a int"),
        (lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[9999])), r"stop_token_ids \[9999\] are outside"),
        (lambda llm: llm.stream(["a"]), "token 0 of the prompt is 'a'"),
        (
            lambda llm: llm.stream("a", SamplingParams(n=2)),
            "n is 2, which is for generate; here, start one and fork it 1",
        ),
        (
            lambda llm: llm.start("a", SamplingParams(n=3)),
            "n is 3, which is for generate; here, start one and fork it 2",
        ),
        (lambda llm: llm.start("a", 3), "params is a int"),
        (lambda llm: llm.fork(3), "generation is a int; what LLM.start or LLM.fork returned is needed"),
        (lambda llm: llm.abort("a"), "generation is a str"),
        (lambda llm: llm.forward(3), "sequences is a int"),
        (lambda llm: llm.forward("abc"), "sequences is a str"),
        (lambda llm: llm.forward([0, 1]), "a prompt is a int"),
        (lambda llm: llm.forward([[0]], capture="final.normed"), "capture is a str"),
        (lambda llm: llm.forward([[0]], logits="some"), "logits is 'some'"),
        (lambda llm: llm.forward([[0]], num_prompt_tokens=1), "num_prompt_tokens is a int"),
        (lambda llm: llm.forward([[0]], num_prompt_tokens=[]), r"num_prompt_tokens is \[\]; 1 integers"),
        (lambda llm: llm.forward([[0]], num_prompt_tokens=["1"]), r"num_prompt_tokens is \['1'\]"),
        (lambda llm: llm.forward([[0]], num_prompt_tokens=[2]), "no part may exceed the whole"),
        (lambda llm: llm.forward([[0]], num_prompt_tokens=[0]), "at least one prompt token"),
        (lambda llm: llm.forward([[0]], num_prompt_tokens=[True]), r"num_prompt_tokens is \[True\]; 1 integers"),
    ],
)
def test_wrong_arguments_are_refused(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(llm)


SAMPLED = SamplingParams(max_tokens=7, temperature=0.9, ignore_eos=True, seed=11)


def test_continuations_are_requests_with_the_next_seeds(llm: LLM, small: LLM) -> None:
    prompts, params = [PROMPT, PROMPT[:5]], [SAMPLED.model_copy(update={"n": 3}), SAMPLED]
    wanted = [llm.generate(PROMPT, SAMPLED.seeded(seed))[0] for seed in (11, 12, 13)]
    wanted.append(llm.generate(PROMPT[:5], SAMPLED)[0])
    for model in (llm, small):  # the second one has two rings
        found = model.generate(prompts, params)
        assert [output.index for output in found] == [0, 1, 2, 0]
        assert [(o.token_ids, o.text) for o in found] == [(o.token_ids, o.text) for o in wanted]
    assert len({tuple(output.token_ids) for output in wanted[:3]}) == 3


def test_handles_run_together_and_fork_in_the_middle(llm: LLM) -> None:
    wanted = llm.generate([PROMPT, PROMPT[:5]], SAMPLED)
    first, other = llm.start(PROMPT, SAMPLED), llm.start(PROMPT[:5], SAMPLED)
    for _ in range(3):
        assert llm.step()
    assert (first.num_tokens, first.finish_reason) == (3, None)
    same, different = llm.fork(first, 2, [11, 12])
    (own,) = llm.fork(first)
    given_up = llm.fork(other)[0]
    llm.abort(given_up)
    while llm.step():
        pass
    assert not llm.step(), "nothing is left to do"
    assert first.output() == wanted[0]
    assert same.output().token_ids == wanted[0].token_ids and same.output().text == wanted[0].text
    assert other.output() == wanted[1]
    assert different.token_ids[:3] == own.token_ids[:3] == wanted[0].token_ids[:3]
    assert given_up.token_ids == wanted[1].token_ids[:3]
    assert different.token_ids != wanted[0].token_ids
    assert given_up.output().finish_reason == "abort"
    assert "".join(chunk.text for chunk in first.chunks) == wanted[0].text
    with pytest.raises(RequestError, match="has ended"):
        llm.fork(first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "n is 0; a number of forks from 1 to 4096 is needed"),
        ((10**30,), "n is 1000000.* from 1 to 4096"),
        ((True,), "n is True"),
        ((2, [1]), "1 seeds were given for 2 forks"),
        ((1, ["x"]), "sampling parameters: seed"),
        ((1, 5), "seeds is a int"),
    ],
)
def test_wrong_forks_are_refused(llm: LLM, arguments: tuple[Any, ...], message: str) -> None:
    generation = llm.start(PROMPT, SAMPLED)
    with pytest.raises(RequestError, match=message):
        llm.fork(generation, *arguments)
    llm.abort(generation)


def test_a_step_that_fails_gives_up_what_it_ran_and_the_model_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=9))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT)
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in stream] == [([], "abort")]
    assert llm.generate(PROMPT, SamplingParams(max_tokens=3))[0].token_ids == CONTINUATION[:3]


def test_what_ended_before_its_step_failed_has_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = llm.start(PROMPT, SamplingParams(max_tokens=1))
    (child,) = llm.fork(parent)
    sample, drawn = Sampler.sample, iter(range(2))
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", lambda *args: interrupt() if next(drawn) else sample(*args))
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    assert [chunk.finish_reason for chunk in parent.chunks] == [parent.finish_reason] == ["length"]
    assert [chunk.finish_reason for chunk in child.chunks] == [child.finish_reason] == ["abort"]
    assert not llm.engine.busy


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_without_a_tokenizer_ids_work_and_text_is_refused(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "data" / "golden" / "tiny-a"
    for file in (golden / "config.json", golden / "model.safetensors.index.json", *golden.glob("model-*.safetensors")):
        (tmp_path / file.name).symlink_to(file)
    with LLM(tmp_path, EngineConfig(**EXACT)) as llm:
        output = llm.generate([7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True))[0]
        assert (len(output.token_ids), output.text) == (3, "")
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate("text")
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            llm.generate([7], SamplingParams(stop=["a"]))


def test_close_frees_the_model_and_later_calls_say_so() -> None:
    with LLM("tiny", EngineConfig(**EXACT)) as llm:
        model = weakref.ref(llm.engine.runner.model)
        stream = llm.stream(PROMPT)
        next(stream)
    with pytest.raises(MiniDeepInferError, match="this LLM was closed"):
        next(stream)
    for call in (lambda: llm.forward([[0]]), lambda: llm.generate("a"), lambda: llm.stream("a"), llm.step):
        with pytest.raises(MiniDeepInferError, match="this LLM was closed"):
            call()
    llm.close()
    del stream
    assert model() is None


def test_the_public_names() -> None:
    assert minideepinfer.__version__.count(".") == 2
    assert all(getattr(minideepinfer, name) is not None for name in minideepinfer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = minideepinfer.nothing
