"""What two engines store after identical inputs: equal bytes, wherever they lie and whatever lay there before.

Identical inputs are the same steps: requests, chunks, rollbacks, forks, aborts and evictions. In other chunks sums are
added in another order, and a value that lies at a rounding boundary may get another code: counted in `test_cache`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import measured
import pytest
import torch
from cache_oracle import make_runner
from engine_fixtures import poison
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.runner import Runner
from scripted import BLOCK, LONGEST, Drafted, Scripted, published, tokens
from torch import Tensor

PAGES = {"page_tokens": 8, "num_pages": 15, "max_requests": 4, "prefix": True}
MODEL = "reuse in the decoder"


class Life:
    """A random life of an engine, the same for the same seed; `places` says in which order pages and rings are used."""

    def __init__(self, runner: Runner, seed: int, places: int) -> None:
        poison(runner)
        self.runner, self.engine, self.rng = runner, Engine(runner), random.Random(seed)
        self.alive: list[Scripted] = []
        self.seen: Counter[str] = Counter()
        for free in (self.engine.scheduler.pages._free, self.engine.scheduler.memory._free_rings):
            random.Random(places).shuffle(free)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """After each step, all that is stored and all logits that came."""
        for _ in range(30):
            self.rng.choice([self.add, self.add, self.take_back, self.fork, self.abort, self.evict])()
            if self.engine.busy:
                self.engine.scheduler.max_tokens_per_step = self.rng.choice([5, 13, 34, LONGEST])
                self.engine.step()
                self.seen["steps"] += 1
                yield self.stored()
                self.alive = [scripted for scripted in self.alive if scripted.finish_reason is None]

    def add(self) -> None:
        ids = tokens(0, 46)[: self.rng.randrange(46)] + tokens(self.rng.randrange(2, 5), self.rng.randrange(1, 10))
        prompt, draft = max(1, len(ids) - self.rng.choice([0, 6])), self.rng.choice([1, 3, 6])
        request = Drafted(next(self.engine._ids), list(ids), prompt, len(ids) + 12, "kept", draft=draft)
        self.alive.append(Scripted(request, self.rng.randrange(30, 39)))
        self.engine.start(self.alive[-1])  # type: ignore[arg-type]

    def take_back(self) -> None:
        behind = [s for s in self.alive if s.request.num_computed_tokens > s.final]
        if behind:
            scripted = self.rng.choice(behind)
            stays = self.rng.randrange(scripted.final, scripted.request.num_computed_tokens)
            self.engine.scheduler.truncate(scripted.request, stays)
            scripted.seed = self.rng.randrange(10, 19)
            scripted.extend(self.rng.randrange(1, 1 + BLOCK))
            self.seen["rollbacks"] += 1

    def fork(self) -> None:
        if self.alive:
            self.alive += self.engine.fork(self.rng.choice(self.alive), [self.rng.randrange(20, 29)])  # type: ignore[arg-type]

    def abort(self) -> None:
        if len(self.alive) > 2:
            self.engine.abort(self.alive.pop(self.rng.randrange(len(self.alive))))  # type: ignore[arg-type]

    def evict(self) -> None:
        assert self.engine.prefixes is not None
        self.engine.prefixes.evict(2)

    def stored(self) -> dict[str, Tensor]:
        """Rows of the pools by whom they belong to and what they are, and logits."""
        assert self.engine.prefixes is not None
        found: dict[str, Tensor] = {}
        for scripted in self.alive:
            request = scripted.request
            found |= {f"{request.request_id} {name}": rows for name, rows in self.held(request).items()}
            found |= {f"{request.request_id} logits {p}": row for p, row in scripted.rows.items()}
        for ids, node in published(self.engine.prefixes):
            for name, pool in self.entries().items():
                found[f"{ids} {name}"] = pool[node.page]
        return {name: value.clone() for name, value in found.items()}

    def held(self, request: Request) -> dict[str, Tensor]:
        if request.ring is None:
            return {}
        cache, text, count = self.runner.cache, self.runner.config.text_config, request.num_computed_tokens
        slots = torch.arange(max(request.first_computed_token, count - text.sliding_window), count) % cache.ring_size
        found = {f"window {layer}": pool[request.ring, slots] for layer, pool in enumerate(cache.window)}
        for name, pool in self.entries().items():
            rows = pool[request.pages].flatten(0, 1)
            found[name] = rows[: count * pool.shape[1] // self.runner.page_tokens]
        if count % 2:
            for layer, pool in cache.pending.items():
                found[f"pending {layer}"] = pool[request.ring, count // 2 % cache.pair_slots]
        return found

    def counts(self) -> Counter[str]:
        assert self.engine.prefixes is not None
        return (
            self.seen
            + Counter(vars(self.engine.prefixes.statistics))
            + Counter(vars(self.engine.scheduler.memory.forks))
        )

    def entries(self) -> dict[str, Tensor]:
        cache = self.runner.cache
        return {f"main {source}": pool for source, pool in cache.main.items()} | {
            f"index {source}": pool for source, pool in cache.index_keys.items()
        }


def runner_in(layout: str, replay: str) -> Runner:
    return make_runner(MODEL, replay, "released", layout=layout, **PAGES)


def decoded(found: dict[str, Tensor], runner: Runner) -> dict[str, Tensor]:
    """Entries as values; all else as it is."""
    layout = runner.cache.layout
    formats = {"window": layout.window, "main": layout.main, "index": layout.index}

    def values(name: str, rows: Tensor) -> Tensor:
        kind = name.split()[-2]
        return formats[kind].decode(rows, torch.float32) if kind in formats else rows

    return {name: values(name, rows) for name, rows in found.items()}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal; NaN, which is where nothing was written (windows that are cut off), is like NaN."""
    if one.dtype != torch.float32:
        return torch.equal(one, other)
    nothing = one.isnan()
    bits = (one.masked_fill(nothing, 0).view(torch.int32), other.masked_fill(nothing, 0).view(torch.int32))
    return torch.equal(nothing, other.isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("replay", ["full", "halo", "bounded"])
def test_stored_bytes_are_equal_after_identical_inputs(replay: str) -> None:
    """Three engines: two with packed bytes, of which the second uses other pages and rings; one with plain bfloat16."""
    runners = runner_in("released", replay), runner_in("released", replay), runner_in("bf16", replay)
    assert runners[0].cache.main[1].dtype == torch.uint8
    total, compared = Counter[str](), 0
    for seed in range(5):
        one, other, plain = lives = [Life(r, seed, places) for r, places in zip(runners, (0, 1 + seed, 0), strict=True)]
        for found in zip(*lives, strict=True):
            own, elsewhere, unpacked = found
            assert own.keys() == elsewhere.keys() == unpacked.keys()
            values, plain_values = decoded(own, one.runner), decoded(unpacked, plain.runner)
            for name, rows in own.items():
                assert same_bits(rows, elsewhere[name]), name
                assert same_bits(values[name], plain_values[name]), name
                assert "logits" not in name or rows.isfinite().all(), name
                compared += rows.nbytes
        statistics = [
            {**vars(life.engine.prefixes.statistics), **vars(life.engine.scheduler.memory.forks)} for life in lives
        ]  # type: ignore[union-attr]
        assert statistics[0] == statistics[1] == statistics[2] and one.seen == other.seen
        total += Counter(statistics[0]) + one.seen
    measured.lines.append(f"stored bytes, replay {replay}: {compared:,} bytes equal over {dict(total)}")
    for what in ("hits", "evicted_pages", "forks", "rollbacks"):
        assert total[what] >= 10, total
