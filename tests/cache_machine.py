"""A random life of an engine's caches: requests come, share, are taken back, given up and evicted; an oracle knows all.

Memory that nobody holds is NaN before every step, so that what is read without having been written shows. A row may
differ from the oracle's by `TOLERANCE`; one that differs by more is excluded only if a choice within `CLEAR_MARGIN` of
a tie was made in it or before it, and is counted then. All other rows must agree.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from cache_oracle import make_runner, oracle
from engine_fixtures import poison
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from minideepinfer.errors import RequestError
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.request import LogitsKind, Request
from minideepinfer.runtime.runner import Runner
from scripted import BLOCK, LONGEST, Drafted, Scripted, published, tokens
from torch import Tensor

T = TypeVar("T")

TOLERANCE = 1e-5
POOL_TOKENS, RINGS = 144, 5
STEM = 46
BUDGETS = st.sampled_from([2, 5, 8, 13, 21, 34, LONGEST])


@dataclass(frozen=True)
class Setting:
    """How an engine is run; `bounded` where it is exact: one layer behind the candidate source, and no hits."""

    model: str
    replay: str
    page_tokens: int

    @property
    def prefix(self) -> bool:
        return self.replay != "bounded"


SETTINGS = [
    *(
        Setting(f"reuse in the {where}", replay, page_tokens)
        for where in ("encoder", "decoder")
        for replay in ("full", "halo")
        for page_tokens in (4, 8, 12)
    ),
    Setting("reuse in the encoder", "bounded", 8),
]


@cache
def _runner(setting: Setting) -> Runner:
    pages = {"page_tokens": setting.page_tokens, "num_pages": POOL_TOKENS // setting.page_tokens}
    return make_runner(setting.model, setting.replay, max_requests=RINGS, prefix=setting.prefix, **pages)


def _pick(data: st.DataObject, items: Sequence[T]) -> T:
    """One of them, drawn by number, since failures print what is drawn."""
    return items[data.draw(st.integers(0, len(items) - 1))]


class CacheMachine(RuleBasedStateMachine):
    """Drives an engine; `seen` counts what happened, over all machines of a run."""

    def __init__(self, seen: Counter[str], choices: Sequence[Setting] = SETTINGS, fresh: bool = False) -> None:
        """Start without an engine.

        Args:
            seen: counts.
            choices: how an engine may be run.
            fresh: load a runner for each machine, since what it is made of was changed.
        """
        super().__init__()
        self.seen, self.choices, self.fresh = seen, choices, fresh

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.setting = setting = _pick(data, self.choices)
        self.runner = (_runner.__wrapped__ if self.fresh else _runner)(setting)
        self.engine = Engine(self.runner)
        self.scheduler, self.pages, self.tree = self.engine.scheduler, self.engine.scheduler.pages, self.engine.prefixes
        self.oracle = oracle(setting.model)
        self.known: list[tuple[int, ...]] = []
        self.alive: list[Scripted] = []
        self.contents: dict[Any, list[Tensor]] = {}
        poison(self.runner)
        self.seen["machines"] += 1

    # Rules

    @rule(
        stem=st.integers(0, 1),
        cut=st.integers(0, STEM),
        tail=st.integers(1, 10),
        seed=st.integers(2, 5),
        forced=st.sampled_from([0, 0, 6, 20]),
        room=st.integers(0, LONGEST - STEM - 10),
        draft=st.sampled_from([1, 2, 3, 6]),
        logits=st.sampled_from(["kept", "kept", "kept", "last", "all"]),
    )
    def add(
        self, stem: int, cut: int, tail: int, seed: int, forced: int, room: int, draft: int, logits: LogitsKind
    ) -> None:
        """A request that begins as others do; `forced` of its tokens lie behind its prompt, `room` more will follow."""
        self._add(tokens(stem, STEM)[:cut] + tokens(seed, tail), forced, room, draft, logits)

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        tail=st.integers(0, 6),
        seed=st.integers(6, 9),
        forced=st.sampled_from([0, 0, 6, 20]),
        draft=st.sampled_from([1, 2, 3, 6]),
    )
    def reuse(self, data: st.DataObject, tail: int, seed: int, forced: int, draft: int) -> None:
        """The tokens of an earlier request, and more."""
        ids = _pick(data, self.known)
        self._add((ids + tokens(seed, tail))[: LONGEST - 8], forced, 8, draft, "kept")

    def _add(self, ids: tuple[int, ...], forced: int, room: int, draft: int, logits: LogitsKind) -> None:
        self.known.append(ids)
        number, prompt = next(self.engine._ids), max(1, len(ids) - forced)
        scripted = Scripted(Drafted(number, list(ids), prompt, len(ids) + room, logits, draft=draft), 30 + number % 9)
        self.engine.start(scripted)  # type: ignore[arg-type]
        self.alive.append(scripted)
        self.seen["requests"] += 1

    @precondition(lambda self: self.engine.busy)
    @rule(budgets=st.lists(BUDGETS, min_size=1, max_size=4))
    def step(self, budgets: list[int]) -> None:
        for budget in budgets:
            if self.engine.busy:
                self._step(budget)

    @precondition(lambda self: self.engine.busy)
    @rule(
        data=st.data(),
        depths=st.lists(st.integers(1, BLOCK), min_size=1, max_size=3),
        budget=BUDGETS,
        seed=st.integers(10, 19),
        more=st.integers(1, 8),
    )
    def rollback(self, data: st.DataObject, depths: list[int], budget: int, seed: int, more: int) -> None:
        """Once a request is so far behind what must stay, take that many tokens back, and go on with others."""
        for depth in depths:
            while self.engine.busy and not self._far(depth):
                self._step(budget)
            if self.engine.busy:
                self._take_back(_pick(data, self._far(depth)), depth, seed, more)

    def _take_back(self, scripted: Scripted, depth: int, seed: int, more: int) -> None:
        self._ask(scripted)
        with pytest.raises(RequestError, match="cannot go back"):
            self.scheduler.truncate(scripted.request, scripted.final - 1)
        self.scheduler.truncate(scripted.request, scripted.request.num_computed_tokens - depth)
        scripted.seed, scripted.asked = seed, True
        scripted.extend(more)
        self.seen["rollbacks"] += 1
        self.seen["tokens taken back"] += depth

    def _far(self, depth: int) -> list[Scripted]:
        return [s for s in self.alive if s.request.num_computed_tokens - s.final >= depth]

    @precondition(lambda self: self.engine.busy)
    @rule(data=st.data(), seeds=st.lists(st.integers(20, 29), min_size=1, max_size=3))
    def fork(self, data: st.DataObject, seeds: list[int]) -> None:
        """Let others go on from what a request knows: at once, or from the end of its prompt."""
        parent = _pick(data, self.alive)
        self._ask(parent)
        children = self.engine.fork(parent, seeds)  # type: ignore[arg-type]
        for child in children:
            self.alive.append(child)
            if not parent.request.in_prompt:  # from here on other tokens than the parent's
                del child.request.token_ids[parent.request.num_computed_tokens :]
                child.extend(child.request.draft)

    @precondition(lambda self: self.engine.busy)
    @rule(data=st.data(), budget=BUDGETS)
    def abort(self, data: st.DataObject, budget: int) -> None:
        self._step(budget)
        if self.alive:
            scripted = _pick(data, self.alive)
            self._ask(scripted)
            self.seen["aborts"] += 1
            self.seen["of them, of waiting requests"] += scripted.request in self.scheduler.waiting
            self.engine.abort(scripted)  # type: ignore[arg-type]
            self.alive.remove(scripted)

    @precondition(lambda self: self.tree)
    @rule(pages=st.integers(1, 4))
    def evict(self, pages: int) -> None:
        evictable = self.tree.evictable()
        assert self.tree.evict(pages) == min(pages, evictable)
        self.seen["pages evicted by a rule"] += min(pages, evictable)

    # What must be true

    def _step(self, budget: int) -> None:
        self.scheduler.max_tokens_per_step = budget
        self._poison_free()
        for scripted in self.alive:
            if scripted.request in self.scheduler.waiting:  # a fork that starts over has a ring of its own making
                scripted.final = scripted.request.num_prompt_tokens
        running = self.scheduler.running
        self.engine.step()
        for scripted in list(self.alive):
            request = scripted.request
            scripted.asked |= request in self.scheduler.running and request not in running
            if scripted.finish_reason is not None:
                self.alive.remove(scripted)
            if scripted.finish_reason is not None or (scripted.asked and scripted.rows):
                self._ask(scripted)
        self.seen["steps"] += 1
        self.seen["steps in which a request waited"] += bool(self.scheduler.waiting)
        self.check()

    def _exact(self, request: Request, position: int) -> bool:
        """Whether a row equals a cold run's: all that are not run again, or behind a cut decoder all from the last."""
        first = request.num_prompt_tokens - 1
        if request.logits == "all" or self.setting.replay == "full":
            first = min(first, request.num_shared_tokens)
        return position >= first

    def _ask(self, scripted: Scripted) -> None:
        """Compare the rows that came so far with the oracle's."""
        request, rows = scripted.request, scripted.rows
        positions = sorted(position for position in rows if self._exact(request, position))
        if positions:
            expected = self.oracle.of(tuple(request.token_ids))
            own, cold = torch.stack([rows[p] for p in positions]), expected.logits[positions]
            off = ~((own - cold).norm(dim=1) <= TOLERANCE * cold.norm(dim=1))  # NaN is off
            doubtful = expected.doubtful[positions]
            wrong = [p for p, bad in zip(positions, off & ~doubtful, strict=True) if bad]
            assert not wrong, f"logits: rows {wrong} of request {request.request_id} are not those of a cold run"
            self.seen["rows"] += len(positions)
            self.seen["rows excluded"] += int(off.sum())
            self.seen["rows behind a close choice"] += int(doubtful.sum())
        scripted.rows, scripted.asked = {}, False

    def _poison_free(self) -> None:
        cache, free = self.runner.cache, self.pages._free
        for pool in (*cache.main.values(), *cache.index_keys.values()):
            pool[free] = torch.nan
        for pool in (*cache.window, *cache.pending.values()):
            pool[self.scheduler.memory._free_rings] = torch.nan

    @invariant()
    def check(self) -> None:
        """Everything has its holders, and what is published is right."""
        requests = [scripted.request for scripted in self.alive]
        known = (*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.pending_forks)
        assert {id(r) for r in requests} == {id(r) for r in known} and len(known) == len(requests), "requests: lost"
        nodes = dict(published(self.tree)) if self.tree else {}
        held = Counter(page for request in requests for page in request.pages)
        held += Counter(node.page for node in nodes.values())
        free = [page for page in range(self.pages.num_pages) if not held[page]]
        assert sorted(self.pages._free) == free, "pages: free ones are not those that nobody holds"
        assert all(self.pages.holders(page) == held[page] for page in range(self.pages.num_pages)), "pages: counts"
        rings = [request.ring for request in requests if request.ring is not None]
        assert sorted([*rings, *self.scheduler.memory._free_rings]) == list(range(RINGS)), "rings: one holder each"
        for request in self.scheduler.waiting:
            assert request.ring is None and not request.pages, "requests: waiting ones hold nothing"
        for scripted in self.alive:
            if scripted.request in self.scheduler.running:
                self._check_pages(scripted, held)
        self._check_contents(nodes)

    def _check_pages(self, scripted: Scripted, held: Counter[int]) -> None:
        """There are as many as reserved, and those that a request may still write belong to it alone."""
        request = scripted.request
        assert len(request.pages) == self.pages.pages_for(request.max_total_tokens), "pages: as many as reserved"
        final = max(request.num_shared_tokens, min(scripted.final, request.num_computed_tokens))
        written = request.pages[final // self.pages.page_tokens :]
        assert all(held[page] == 1 for page in written), "pages: one that is written has another holder"

    def _check_contents(self, nodes: dict[tuple[int, ...], Any]) -> None:
        """What is published are the entries of its tokens, and stays what it was, bit for bit."""
        for request in self.scheduler.running:
            self.oracle.of(tuple(request.token_ids))  # the whole of it, of which pages are parts
        cache, before, self.contents = self.runner.cache, self.contents, {}
        for ids, node in nodes.items():
            pools = [pool[source][node.page] for source in cache.main for pool in (cache.main, cache.index_keys)]
            if node not in before:
                self._compare_entries(ids, pools)
            was = before.get(node) or [pool.clone() for pool in pools]
            same = all(torch.equal(*pair) for pair in zip(was, pools, strict=True))
            assert same, "tree: a page that is published was written"
            self.contents[node] = was

    def _compare_entries(self, ids: tuple[int, ...], pools: list[Tensor]) -> None:
        expected = self.oracle.of(ids)
        wanted = [t for main_and_keys in expected.entries.values() for t in main_and_keys]
        for own, whole in zip(pools, wanted, strict=True):
            end = len(ids) * len(own) // self.pages.page_tokens
            cold = whole[end - len(own) : end]
            close = (own - cold).norm() <= TOLERANCE * cold.norm()
            assert close or expected.doubtful[len(ids) - 1], "tree: a page does not hold the entries of its tokens"
            self.seen["pages compared"] += 1
            self.seen["pages excluded"] += not close

    def teardown(self) -> None:
        """Run all that is left, and see that nothing leaks; not behind a failure, which would be told in its place."""
        if sys.exc_info()[0] is not None or not hasattr(self, "engine"):
            return
        while self.engine.busy:
            self._step(LONGEST)
        assert not self.alive
        self._count()
        if self.tree is not None:
            self.tree.evict(self.pages.num_pages)
            assert len(self.tree) == 0, "tree: pages that nobody uses can be evicted"
        assert self.pages.num_free == self.pages.num_pages, "pages: all come back"
        assert self.scheduler.num_free_rings == RINGS, "rings: all come back"

    def _count(self) -> None:
        forks = self.scheduler.memory.forks
        self.seen.update({f"forks: {name}": number for name, number in vars(forks).items()})
        if self.tree is not None:
            self.seen.update({f"prefixes: {name}": number for name, number in vars(self.tree.statistics).items()})
