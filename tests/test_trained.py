"""The trained checkpoint gives the log-probabilities, perplexities and continuations recorded with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from minideepinfer.config import EngineConfig
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.testing.golden_bounds import Variant
from minideepinfer.testing.golden_runs import make_request, run_sequence
from safetensors.torch import load_file
from torch import Tensor

TRAINED = Path(__file__).parent / "data/trained"
RECORDED: dict[str, Any] = json.loads((TRAINED / "golden.json").read_bytes())
TENSORS = load_file(TRAINED / "golden.safetensors")
SNIPPETS: dict[str, Any] = RECORDED["snippets"]
ALL_SNIPPETS = pytest.mark.parametrize("name", SNIPPETS)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(variant: str, replay: str = "full") -> Runner:
    return Runner("tiny", Variant.parse(variant).engine_config(EngineConfig(), 16, replay))


@pytest.fixture(scope="module")
def exact() -> Runner:
    return load("fp32-noq")


@pytest.fixture(scope="module")
def bounded() -> Runner:
    return load("fp32-noq", "bounded")


def log_probabilities(logits: Tensor, following: list[int]) -> Tensor:
    """Float64 `[n]` of the token that follows each row `[n, vocab]`."""
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(following).unsqueeze(1)).squeeze(1)


def whole(length: int) -> list[int]:
    return [length]


def ragged(length: int) -> list[int]:
    """Chunks of 61, 1, 32, 2, 97, 7 tokens and so on, odd and even, shorter and longer than the window of 32."""
    sizes, chunks = [61, 1, 32, 2, 97, 7], []
    while length:
        chunks.append(min(sizes[len(chunks) % len(sizes)], length))
        length -= chunks[-1]
    return chunks


def decoded(length: int) -> list[int]:
    """A prefill and 41 decode steps, more than a window ring has slots."""
    return [length - 41] + [1] * 41


@ALL_SNIPPETS
@pytest.mark.parametrize("cut", [whole, ragged, decoded])
def test_log_probabilities(exact: Runner, name: str, cut: Callable[[int], list[int]]) -> None:
    ids = SNIPPETS[name]["ids"]
    chunks = cut(len(ids))
    logits = run_sequence(exact, ids, chunks, prompt=chunks[0] if cut is decoded else None)
    assert len(logits) == len(ids)
    error = (log_probabilities(logits[:-1], ids[1:]) - TENSORS[f"{name}.fp32-noq.logprob"]).abs()
    assert error.max() <= 1e-4
    # Greedy choices too, wherever two tokens are not nearly equal.
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert torch.equal(logits.argmax(-1)[clear], TENSORS[f"{name}.fp32-noq.argmax"][clear].long())


@ALL_SNIPPETS
def test_log_probabilities_in_bounded_replay(bounded: Runner, name: str) -> None:
    snippet = SNIPPETS[name]
    ids, prompt, first = snippet["ids"], snippet["bounded"]["prompt"], snippet["bounded"]["first_row"]
    logits = run_sequence(bounded, ids, [prompt] + [1] * (len(ids) - prompt), prompt=prompt, logits="kept")
    assert len(logits) == len(ids) - first
    own, golden = log_probabilities(logits[:-1], ids[first + 1 :]), TENSORS[f"{name}.bounded.fp32-noq.logprob"]
    assert (own - golden).abs().max() <= 1e-4
    # The record of exact replay is another one, or this test would show nothing.
    assert (golden - TENSORS[f"{name}.fp32-noq.logprob"][first:]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "chunks"), [("sqlite3-open", [8]), ("new-database", [4, 2, 1]), ("python-448-head", [150])]
)
def test_greedy_continuation(exact: Runner, name: str, chunks: list[int]) -> None:
    """64 tokens, each chosen from the logits of the step before it."""
    recorded = RECORDED["greedy"][name]
    prompt, expected = recorded["prompt_ids"], recorded["new_ids"]
    request = make_request(exact, prompt + expected, len(prompt), "last")
    request.token_ids = list(prompt)
    assert sum(chunks) == len(prompt)
    for count in chunks + [1] * (len(expected) - 1):
        (result,) = exact.execute([ScheduledRequest(request, count)])
        if request.num_computed_tokens == len(request.token_ids):
            request.token_ids.append(int(result.logits[-1].argmax()))
    assert len(expected) == 64
    assert request.token_ids[len(prompt) :] == expected


@pytest.mark.parametrize("variant", ["fp32-q", "fp32-q-a8", "bf16-q", "bf16-noq", "bf16-q-a8"])
def test_perplexity(variant: str) -> None:
    """Within 3 % of fp32-q for each snippet, 1.5 % in the mean."""
    runner = load(variant)
    ratios = []
    for snippet in SNIPPETS.values():
        ids = snippet["ids"]
        logits = run_sequence(runner, ids, whole(len(ids)))
        perplexity = (-log_probabilities(logits[:-1], ids[1:]).mean()).exp()
        ratios.append(float(perplexity) / snippet["perplexity"]["fp32-q"])
    assert all(abs(ratio - 1) <= 0.03 for ratio in ratios), ratios
    assert abs(sum(ratios) / len(ratios) - 1) <= 0.015, ratios
