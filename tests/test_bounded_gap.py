"""What `replay: bounded` gives up, behind a prefix hit and without one, measured and printed at the end of the run.

A hit in bounded replay runs one window of rows again, so its windows are cut off twice: in the encoder before the hit,
and in the decoder before the last window of the prompt. The latter happens in every bounded prefill and is what the
golden `bounded.*` runs record; the former is measured here, against a cold run in bounded replay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measured
import pytest
import torch
from engine_fixtures import PAGE_TOKENS, golden_tokens, poison, runner_of
from golden_sets import GOLDEN
from minideepinfer.config import EngineConfig
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.runner import Runner
from torch import Tensor

SNIPPETS: dict[str, Any] = json.loads((Path(__file__).parent / "data/trained/golden.json").read_bytes())["snippets"]


def prompt_of(name: str, sequence: str) -> int:
    manifest = json.loads((GOLDEN / name / "manifest.json").read_bytes())
    return next(int(s["bounded"]["prompt"]) for s in manifest["sequences"] if s["name"] == sequence)


def logits(engine: Engine, ids: list[int], prompt: int) -> Tensor:
    """Of the last prompt row and of all behind it."""
    request = engine.make_request(ids, len(ids), prompt, "kept")
    return torch.cat(engine.score([request])[request.request_id])[prompt - len(ids) - 1 :]


def hit_and_cold(runner: Runner, ids: list[int], prompt: int, shared: int) -> tuple[Tensor, Tensor, int]:
    """Logits behind a hit on the first `shared` tokens, those of a cold run, and how many tokens were found."""
    engine = Engine(runner)
    cold = logits(engine, ids, prompt)
    engine = Engine(runner)
    logits(engine, ids[:shared], shared)
    assert engine.prefixes is not None
    hit = logits(engine, ids, prompt)
    return hit, cold, engine.prefixes.statistics.hit_tokens


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("name", "sequence"), [("tiny-a", "s101"), ("tiny-b", "s151")])
def test_the_gap_on_the_golden_sets(name: str, sequence: str) -> None:
    """Random weights carry everything on to every row, so the gap is large; a hit in halo replay has none."""
    ids, prompt = golden_tokens(name, sequence), prompt_of(name, sequence)
    shared = (prompt - 1) // PAGE_TOKENS[name] * PAGE_TOKENS[name]
    runners = {r: runner_of(name, replay=r, cache=(("prefix", True),)) for r in ("bounded", "halo", "full")}
    for runner in runners.values():
        poison(runner)
    hit, cold, found = hit_and_cold(runners["bounded"], ids, prompt, shared)
    assert found == shared
    exact = logits(Engine(runners["full"]), ids, prompt)
    measured.lines.append(
        f"bounded replay, {name} {sequence}, float32, logits from the last of {prompt} prompt rows on: behind a hit of "
        f"{shared} tokens {gap(hit, cold):.1e} from a cold bounded run and {gap(hit, exact):.1e} from an exact one; "
        f"cold bounded {gap(cold, exact):.1e} from exact"
    )
    assert 1e-6 < gap(hit, cold) < 1
    halo, *_ = hit_and_cold(runners["halo"], ids, prompt, shared)
    assert gap(halo, exact) < 1e-5


@pytest.fixture(scope="module")
def trained() -> dict[str, Runner]:
    config = {"dtype": "float32", "kv_quantization": "none", "activation_quantization": "none"}
    cache = {"page_tokens": 16, "num_pages": 64, "prefix": True}
    return {r: Runner("tiny", EngineConfig(**config, replay=r, cache=cache)) for r in ("bounded", "full")}


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_gap_on_the_trained_checkpoint(trained: dict[str, Runner], name: str) -> None:
    """Log-probabilities of the text behind the prompt."""
    prompt = SNIPPETS[name]["bounded"]["prompt"]
    ids, shared = SNIPPETS[name]["ids"][: prompt + 48], (prompt - 40) // 16 * 16
    hit, cold, found = hit_and_cold(trained["bounded"], ids, prompt, shared)
    assert found == shared
    own, bounded = log_probabilities(hit, ids[prompt:]), log_probabilities(cold, ids[prompt:])
    request = (full := Engine(trained["full"])).make_request(ids, len(ids), len(ids), "all")
    exact = log_probabilities(torch.cat(full.score([request])[request.request_id])[prompt - 1 :], ids[prompt:])
    perplexities = [float((-each.mean()).exp()) for each in (own, bounded, exact)]
    off = (own - bounded).abs()
    measured.lines.append(
        f"bounded replay, trained checkpoint, {name}, {len(own)} tokens behind a prompt of {prompt}: perplexity behind "
        f"a hit of {shared} tokens, cold, exact {', '.join(f'{p:.4f}' for p in perplexities)}; log-probabilities are "
        f"off cold by {float(off.mean()):.1e} in the mean, {float(off.max()):.1e} at most"
    )
    assert off.isfinite().all()
    assert abs(perplexities[0] / perplexities[2] - 1) < 0.05


def log_probabilities(rows: Tensor, following: list[int]) -> Tensor:
    """Float64 `[n]` of the tokens that follow the first rows."""
    scores = torch.log_softmax(rows[: len(following)].double(), -1)
    return scores.gather(1, torch.tensor(following).unsqueeze(1)).squeeze(1)
