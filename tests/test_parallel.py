"""Several ranks give the numbers of one: logits, tokens, streams and aborts, for every comm operator."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measured
import numpy as np
import pytest
from checkpoint_files import Entry, edit_shard, shard_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minideepinfer import LLM, EngineConfig, RequestError, SamplingParams
from minideepinfer.checkpoint.size import rank_summaries
from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.runtime.coordinator import Coordinator
from minideepinfer.runtime.generation import Generation
from rank_worlds import Worlds
from torch import Tensor

SQLITE = json.loads((Path(__file__).parent / "data/trained/golden.json").read_text())["greedy"]["sqlite3-open"]
PROMPT, CONTINUATION = SQLITE["prompt_ids"], SQLITE["new_ids"]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kv_quantization": "none",
    "max_tokens_per_step": 7,
    "cache": {"num_pages": 16, "page_tokens": 16, "max_requests": 2},
}
CLOSE = 1e-5
errors: list[float] = []
SHORT = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    found = Worlds()
    yield found
    found.close()
    measured.lines.append(f"ranks against one: worst relative L2 of logits {max(errors):.1e} (bound {CLOSE})")


EVERY = [(size, comm) for size in (2, 4) for comm in ("collective", "all_to_all")]
either = pytest.mark.parametrize("place", [EVERY[0], EVERY[3]], indirect=True, ids=str)
"""For what the comm operator has little to do with."""


@pytest.fixture(scope="module", params=EVERY, ids=str)
def place(request: pytest.FixtureRequest) -> Any:
    """Ranks and comm operator."""
    return request.param


@pytest.fixture
def llm(worlds: Worlds, place: tuple[int, str]) -> LLM:
    return worlds.llm(place[0], **SMALL, ops={"comm": place[1]})


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM("tiny", EngineConfig(**SMALL)) as found:
        yield found


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert [len(logits) for logits in found] == [len(logits) for logits in wanted]
    for number, (got, expected) in enumerate(zip(found, wanted, strict=True)):
        error = float((got - expected).norm() / expected.norm())
        errors.append(error)
        assert error < CLOSE, f"request {number}: {error}"


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(5, 2000), k=length)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Sequences, and how much of each is a prompt: none for some ranks, and one far longer than the others."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5)) + draw(st.sampled_from([[], [40]]))
    prompts = [length if length > 8 else draw(st.integers(max(1, length - 4), length)) for length in lengths]
    seed = draw(st.integers(0, 99))
    return [tokens(seed + number, length) for number, length in enumerate(lengths)], prompts


@SHORT
@given(batch=batches())
def test_logits_are_those_of_one_rank(llm: LLM, alone: LLM, batch: tuple[list[list[int]], list[int]]) -> None:
    sequences, prompts = batch
    found = llm.forward(sequences, num_prompt_tokens=prompts)
    assert_close(found, alone.forward(sequences, num_prompt_tokens=prompts))


def test_a_single_request_leaves_the_other_ranks_empty(llm: LLM, alone: LLM) -> None:
    assert_close(llm.forward([PROMPT]), alone.forward([PROMPT]))


@either
def test_outputs_are_those_of_one_rank(llm: LLM, alone: LLM) -> None:
    prompts = [PROMPT, PROMPT[:3], tokens(1, 20), PROMPT + CONTINUATION[:4], tokens(2, 1)]
    params = [
        SamplingParams(max_tokens=6, logprobs=2),
        SamplingParams(max_tokens=9, temperature=0.9, seed=7),
        SamplingParams(max_tokens=1, prompt_logprobs=1),
        SamplingParams(max_tokens=12, stop="database"),
        SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, top_k=50, seed=1, prompt_logprobs=0, logprobs=0),
    ]
    for found, wanted in zip(llm.generate(prompts, params), alone.generate(prompts, params), strict=True):
        assert (found.token_ids, found.text, found.finish_reason) == (
            wanted.token_ids,
            wanted.text,
            wanted.finish_reason,
        )
        for name in ("logprobs", "prompt_logprobs"):
            theirs, ours = getattr(wanted, name), getattr(found, name)
            assert (theirs is None) == (ours is None)
            for a, b in zip(theirs or [], ours or [], strict=True):
                assert a == b == None or a == pytest.approx(b, abs=1e-4)  # noqa: E711


@either
def test_streams_come_and_go_at_different_steps(llm: LLM, alone: LLM) -> None:
    """More streams than window rings on some ranks, some closed half way: a leak would starve the later ones."""
    params = [SamplingParams(max_tokens=4 + i % 3, temperature=0.8, seed=i) for i in range(9)]
    wanted = [alone.generate(PROMPT[: 2 + i % 6], p)[0].token_ids for i, p in enumerate(params)]
    streams = {}
    for i, p in enumerate(params):
        streams[i] = llm.stream(PROMPT[: 2 + i % 6], p)
        first = next(streams[i]).token_ids
        assert first == wanted[i][:1]
        if i % 3 == 0:
            streams.pop(i).close()
        elif i % 3 == 1:
            rest = [token for chunk in streams.pop(i) for token in chunk.token_ids]
            assert first + rest == wanted[i]
        elif len(streams) > 1:
            oldest, stream = next(iter(streams.items()))
            del streams[oldest]
            assert [token for chunk in stream for token in chunk.token_ids] == wanted[oldest][1:]
    for i, stream in streams.items():
        assert [token for chunk in stream for token in chunk.token_ids] == wanted[i][1:]
    assert not llm.engine.busy


@either
def test_continuations_are_those_of_one_rank(llm: LLM, alone: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.9, seed=3, n=3, logprobs=1, prompt_logprobs=1)
    prompts = [PROMPT, PROMPT[:4], PROMPT[:6]]
    for found, wanted in zip(llm.generate(prompts, params), alone.generate(prompts, params), strict=True):
        assert (found.token_ids, found.text, found.index) == (wanted.token_ids, wanted.text, wanted.index)
        for name in ("logprobs", "prompt_logprobs"):
            theirs, ours = getattr(wanted, name), getattr(found, name)
            assert [entry or {} for entry in ours] == [pytest.approx(entry or {}, abs=1e-4) for entry in theirs]


@either
def test_forks_run_where_their_parent_runs(llm: LLM, alone: LLM) -> None:
    """Of prompts and in the middle, on rank 0 and away, more than there are rings for, some given up."""
    engine = llm.engine
    assert isinstance(engine, Coordinator)
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True, logprobs=0)

    def rank(generation: Generation) -> int:
        return engine._away.get(generation.request.request_id, (0, None))[0]

    parents = [llm.start(PROMPT[: 3 + i], params) for i in range(4)]
    forks = [(i, 10, fork) for i, parent in enumerate(parents) for fork in llm.fork(parent, 1, [10])]
    assert all(rank(fork) == rank(parents[i]) for i, _, fork in forks)
    for _ in range(3):
        llm.step()
    middle = [(i, parent) for i, parent in enumerate(parents) if 0 < parent.num_tokens < 8]
    assert {rank(parent) == 0 for _, parent in middle} == {True, False}, "some on rank 0, some away"
    forks += [(i, 3, fork) for i, parent in middle for fork in llm.fork(parent, 2, [3, 3])]
    llm.abort(parents[0])
    llm.abort(forks.pop(1)[2])
    while llm.step():
        pass
    assert not engine._generations and not engine._away
    for i, seed, fork in [*forks, *((i, 3, parent) for i, parent in enumerate(parents[1:], 1))]:
        wanted, found = alone.generate(PROMPT[: 3 + i], params.seeded(seed))[0], fork.output()
        assert (found.token_ids, found.text, found.finish_reason) == (wanted.token_ids, wanted.text, "length")
        assert found.logprobs == [pytest.approx(entry, abs=1e-4) for entry in wanted.logprobs or []]


@either
def test_requests_go_to_the_rank_with_the_fewest_tokens_left(llm: LLM) -> None:
    engine = llm.engine
    assert isinstance(engine, Coordinator)
    size = engine.runner.world.size
    lengths = [100, *[10] * (size - 1), *[3] * (size - 1), 50]
    generations = [engine.make_generation([5] * n, SamplingParams(max_tokens=1)) for n in lengths]
    for generation in generations:
        engine.start(generation)
    ranks = [engine._away.get(generation.request.request_id, (0,))[0] for generation in generations]
    assert ranks[:size] == list(range(size)), "each rank has one"
    assert ranks[size:-1] == list(range(1, size)) and ranks[-1] == 1, "the first one has the longest"
    for generation in generations:
        engine.abort(generation)
    assert not engine.busy


@either
def test_what_is_refused_leaves_all_ranks_usable(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1: token 0 of the prompt is 5000"):
        llm.generate([PROMPT, [5000]])
    with pytest.raises(RequestError, match="needs 17 pages"):
        llm.forward([[5] * 260])
    assert llm.generate(PROMPT, SamplingParams(max_tokens=3))[0].token_ids == CONTINUATION[:3]


@either
def test_intermediates_are_recorded(llm: LLM, alone: LLM) -> None:
    sequences, names = [PROMPT, PROMPT[:3]], ("layers.*.ffn.out", "final.normed")
    found, wanted = (engine.forward(sequences, capture=names) for engine in (llm, alone))
    assert_close(found[0], wanted[0])
    for got, expected in zip(found[1], wanted[1], strict=True):
        assert list(got) == list(expected)
        assert_close(list(got.values()), list(expected.values()))


@either
def test_rank_0_reads_its_share_and_all_steps_are_counted(llm: LLM) -> None:
    runner = llm.engine.runner
    summaries = rank_summaries(runner.config, runner.world.size)
    assert runner.bytes_read == summaries[0].total.bytes
    before = llm.engine.throughput.prefill_tokens, llm.engine.throughput.decode_tokens
    llm.forward([PROMPT[:5]] * 4, num_prompt_tokens=[3] * 4)
    after = llm.engine.throughput.prefill_tokens, llm.engine.throughput.decode_tokens
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([12, 8], abs=8)
    assert sum(after) - sum(before) == 20


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained checkpoint with all tokens sent to experts 0 and 1, which rank 0 has: the last rank gets none."""
    directory = tmp_path_factory.mktemp("skewed") / "tiny"
    shutil.copytree(directory_of("tiny"), directory)
    bias = np.array([100, 99, *[0] * 6], np.float32).tobytes()

    def edit(entries: dict[str, Entry]) -> None:
        for name, entry in entries.items():
            if name.endswith("ffn.gate.bias"):
                assert len(entry.data) == len(bias)
                entry.data = bias

    for file in {shard_of(directory, f"layers.{layer}.ffn.gate.bias") for layer in range(10)}:
        edit_shard(file, edit)
    return directory


def test_all_tokens_may_go_to_one_rank(worlds: Worlds, place: tuple[int, str], skewed: Path) -> None:
    sequences = [tokens(i, length) for i, length in enumerate((9, 1, 30, 4, 2))]
    with LLM(skewed, EngineConfig(**SMALL)) as alone:
        wanted = alone.forward(sequences, num_prompt_tokens=[6, 1, 30, 2, 1])
    llm = worlds.llm(place[0], skewed, **SMALL, ops={"comm": place[1]})
    found, captured = llm.forward(sequences, num_prompt_tokens=[6, 1, 30, 2, 1], capture=["layers.3.ffn.expert_ids"])
    assert {int(i) for one in captured for i in one["layers.3.ffn.expert_ids"].flatten()} == {0, 1}
    assert_close(found, wanted)
    assert_close(llm.forward(sequences[:2], num_prompt_tokens=[6, 1]), wanted[:2])


@pytest.mark.parametrize("size", [2, 4])
def test_bounded_replay(worlds: Worlds, size: int) -> None:
    """Long prompts, of which the last 32 rows run every layer; in some steps no row of a rank goes on, in some none."""
    bounded = SMALL | {"replay": "bounded", "max_tokens_per_step": 20}
    sequences = [tokens(i, length) for i, length in enumerate((70, 36, 90, 5, 33))]
    prompts = [68, 36, 90, 3, 33]
    with LLM("tiny", EngineConfig(**bounded)) as alone:
        wanted = alone.forward(sequences, num_prompt_tokens=prompts, logits="kept")
        outputs = alone.generate(sequences, SamplingParams(max_tokens=3))
    llm = worlds.llm(size, **bounded)
    assert_close(llm.forward(sequences, num_prompt_tokens=prompts, logits="kept"), wanted)
    found = llm.generate(sequences, SamplingParams(max_tokens=3))
    assert [output.token_ids for output in found] == [output.token_ids for output in outputs]
