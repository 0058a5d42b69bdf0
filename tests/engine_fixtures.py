"""Runners that are loaded once, and requests played on them through the real scheduler."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from golden_sets import GOLDEN
from minideepinfer.cache.pages import PageAllocator
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.request import LogitsKind, Request
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import Scheduler
from torch import Tensor

PACKED_NAN = 255
"""In every byte of an entry: each of its channels is NaN, whatever the format."""
PAGE_TOKENS = {"tiny-a": 8, "tiny-b": 16}
LONGEST = {"tiny-a": "s101", "tiny-b": "s151"}


@cache
def runner_of(name: str, kv_quantization: str = "none", replay: str = "full", **settings: Any) -> Runner:
    """A golden set's checkpoint in float32, with small pages and few of them; `cache` is given as pairs."""
    pages = {"page_tokens": PAGE_TOKENS[name], "num_pages": 64, "max_requests": 4, **dict(settings.pop("cache", ()))}
    config = {
        "dtype": "float32",
        "device": "cpu",
        "kv_quantization": kv_quantization,
        "activation_quantization": "none",
        "replay": replay,
        "cache": pages,
    }
    return Runner(GOLDEN / name, EngineConfig(**config | settings), keep_weights=True)


def pools(runner: Runner) -> list[Tensor]:
    """Every tensor of the cache."""
    cache = runner.cache
    return [*cache.window, *cache.main.values(), *cache.index_keys.values(), *cache.pending.values()]


def poison(runner: Runner) -> None:
    """Fill the cache with NaN: whatever is read without having been written shows in the logits."""
    for pool in pools(runner):
        pool.fill_(torch.nan if pool.is_floating_point() else PACKED_NAN)


def untouched(pool: Tensor) -> bool:
    """Whether a pool, or a part of it, is as `poison` left it."""
    return bool((pool.isnan() if pool.is_floating_point() else pool == PACKED_NAN).all())


def golden_tokens(name: str, sequence: str) -> list[int]:
    """Token ids of a golden sequence."""
    manifest = json.loads((GOLDEN / name / "manifest.json").read_text())
    return next(list(s["token_ids"]) for s in manifest["sequences"] if s["name"] == sequence)


@cache
def text_tokens(name: str, seed: int, length: int) -> tuple[int, ...]:
    """The first tokens of the longest golden sequence (seed 0) or of a random one, image tokens left out."""
    if seed == 0:
        return tuple(golden_tokens(name, LONGEST[name])[:length])
    config = ModelConfig.from_file(GOLDEN / name)
    ids = [i for i in range(config.text_config.vocab_size) if i != config.image_token_id]
    return tuple(random.Random(seed).choices(ids, k=length))


@dataclass
class Played:
    """What a scenario gave: logits rows by request id and position, and what was captured."""

    logits: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    capture: Capture = field(default_factory=lambda: Capture(()))
    steps: int = 0

    def add(self, request_id: int, positions: range, rows: Tensor) -> None:
        self.logits.setdefault(request_id, {}).update(zip(positions, rows, strict=True))

    def rows(self, request_id: int) -> tuple[list[int], Tensor]:
        """Positions, ascending, and their logits."""
        found = self.logits[request_id]
        positions = sorted(found)
        return positions, torch.stack([found[p] for p in positions])


@dataclass(frozen=True)
class Arrival:
    """A request of a scenario: tokens, how many are its prompt, the step at which it comes, and is given up."""

    token_ids: tuple[int, ...]
    prompt: int
    step: int = 0
    abort_at: int | None = None


def play(
    runner: Runner,
    arrivals: Sequence[Arrival],
    budgets: Iterator[int],
    seed: int = 0,
    capture: Sequence[str] = (),
    logits: LogitsKind = "all",
) -> Played:
    """Run requests through the scheduler: request i is `arrivals[i]`, step j has the j-th token budget.

    Pages and rings are handed out in an order drawn from the seed. Tokens behind the prompt are teacher-forced.
    """
    cache, text = runner.engine_config.cache, runner.config.text_config
    rng = random.Random(seed)
    pages = PageAllocator(cache.num_pages, cache.page_tokens)
    scheduler = Scheduler(pages, cache.max_requests, 1, text.max_position_embeddings, 1 + text.dspark_block_size)
    rng.shuffle(pages._free)
    rng.shuffle(scheduler.memory._free_rings)
    played = Played(capture=Capture(capture))
    coming = dict(enumerate(arrivals))
    while coming or scheduler.waiting or scheduler.running:
        for number, arrival in enumerate(arrivals):
            if arrival.step == played.steps:
                ids = list(arrival.token_ids)
                scheduler.add(Request(number, ids, arrival.prompt, len(ids), logits))
                del coming[number]
            if arrival.abort_at == played.steps:
                scheduler.abort(number)
        scheduler.max_tokens_per_step = next(budgets)
        for result in runner.execute(scheduler.schedule(), played.capture):
            request = result.request
            played.add(request.request_id, result.positions, result.logits)
            if request.num_computed_tokens == len(request.token_ids):
                scheduler.abort(request.request_id)
        played.steps += 1
    return played
