"""A random life of an engine's caches: requests come, share, are taken back, given up and evicted; an oracle knows all.

Memory that nobody holds is NaN before every step, so that what is read without having been written shows. A row may
differ from the oracle's by `TOLERANCE`; one that differs by more is excluded only if a choice within `CLEAR_MARGIN` of
a tie was made in it or before it, and is counted then. All other rows must agree.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, TypeVar

import torch
from cache_oracle import LONGEST, make_runner, oracle
from engine_fixtures import poison
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from minideepinfer.cache.prefix_tree import PrefixTree
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.request import LogitsKind, Request
from minideepinfer.runtime.runner import Runner
from torch import Tensor

T = TypeVar("T")

TOLERANCE = 1e-5
POOL_TOKENS, RINGS = 120, 3
STEM = 56
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


@dataclass(eq=False)
class Driven(Request):
    """A request whose tokens are given; behind its prompt it runs up to `draft` known ones a step, as a draft does."""

    draft: int = 1
    rows: dict[int, Tensor] = field(default_factory=dict)
    asked: bool = False

    @property
    def num_pending_tokens(self) -> int:
        if self.in_prompt:
            return super().num_pending_tokens
        return min(self.draft, len(self.token_ids) - self.num_computed_tokens)


@cache
def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(90), k=length))


def _pick(data: st.DataObject, items: Sequence[T]) -> T:
    """One of them, drawn by number, since failures print what is drawn."""
    return items[data.draw(st.integers(0, len(items) - 1))]


def published(tree: PrefixTree) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Every node of a tree, with all tokens up to its end."""
    stack = [((), tree._root)]
    while stack:
        ids, node = stack.pop()
        stack += [((*ids, *edge), child) for edge, child in node.children.items()]
        if ids:
            yield ids, node


class CacheMachine(RuleBasedStateMachine):
    """Drives an engine; `seen` counts what happened, over all machines of a run."""

    def __init__(self, seen: Counter[str], fresh: bool = False) -> None:
        """Start without an engine.

        Args:
            seen: counts.
            fresh: load a runner for each machine, since what it is made of was changed.
        """
        super().__init__()
        self.seen, self.fresh = seen, fresh

    @initialize(setting=st.sampled_from(SETTINGS))
    def start(self, setting: Setting) -> None:
        self.setting = setting
        self.runner = (_runner.__wrapped__ if self.fresh else _runner)(setting)
        self.engine = Engine(self.runner)
        self.scheduler, self.pages, self.tree = self.engine.scheduler, self.engine.scheduler.pages, self.engine.prefixes
        self.oracle = oracle(setting.model)
        self.ids = count()
        self.known: list[tuple[int, ...]] = []
        self.contents: dict[Any, list[Tensor]] = {}
        poison(self.runner)
        self.seen["machines"] += 1

    # Rules

    @rule(
        stem=st.integers(0, 1),
        cut=st.integers(0, STEM),
        tail=st.integers(1, 12),
        seed=st.integers(2, 5),
        forced=st.sampled_from([0, 6, 12, 24]),
        room=st.integers(0, 6),
        draft=st.sampled_from([1, 2, 3, 6]),
        logits=st.sampled_from(["kept", "kept", "kept", "last", "all"]),
    )
    def add(
        self, stem: int, cut: int, tail: int, seed: int, forced: int, room: int, draft: int, logits: LogitsKind
    ) -> None:
        """A request that begins as others do; `forced` of its tokens lie behind its prompt, `room` may follow."""
        self._add(tokens(stem, STEM)[:cut] + tokens(seed, tail), forced, room, draft, logits)

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        tail=st.integers(0, 6),
        seed=st.integers(6, 9),
        forced=st.sampled_from([0, 6, 12, 24]),
        draft=st.sampled_from([1, 2, 3, 6]),
    )
    def reuse(self, data: st.DataObject, tail: int, seed: int, forced: int, draft: int) -> None:
        """The tokens of an earlier request, and more."""
        ids = _pick(data, self.known)
        self._add((ids + tokens(seed, tail))[: LONGEST - 4], forced, 4, draft, "kept")

    def _add(self, ids: tuple[int, ...], forced: int, room: int, draft: int, logits: LogitsKind) -> None:
        prompt = max(1, len(ids) - forced)
        self.known.append(ids)
        self.scheduler.add(Driven(next(self.ids), list(ids), prompt, len(ids) + room, logits, draft=draft))
        self.seen["requests"] += 1

    @precondition(lambda self: self.engine.busy)
    @rule(budgets=st.lists(BUDGETS, min_size=1, max_size=4))
    def step(self, budgets: list[int]) -> None:
        for budget in budgets:
            if self.engine.busy:
                self._step(budget)

    @precondition(lambda self: self.engine.busy)
    @rule(data=st.data(), budget=BUDGETS, seed=st.integers(10, 19), more=st.integers(1, 12))
    def rollback(self, data: st.DataObject, budget: int, seed: int, more: int) -> None:
        """Once a request is behind its prompt, take tokens back, computed or not, and go on with others."""
        while self.engine.busy and not self._behind_prompt():
            self._step(budget)
        if not self.engine.busy:
            return
        request = _pick(data, self._behind_prompt())
        least = max(request.num_prompt_tokens, request.num_computed_tokens - self.scheduler.decode_rows + 1)
        stays = data.draw(st.integers(least, request.num_computed_tokens))
        self._ask(request)
        self.seen["tokens taken back"] += request.num_computed_tokens - stays
        self.scheduler.truncate(request, stays)
        request.token_ids += tokens(seed, more)[: request.max_total_tokens - stays]
        request.asked = True
        self.seen["rollbacks"] += 1

    def _behind_prompt(self) -> list[Driven]:
        return [r for r in self.scheduler.running if r.num_computed_tokens > r.num_prompt_tokens]

    @precondition(lambda self: self.engine.busy)
    @rule(data=st.data(), budget=BUDGETS)
    def abort(self, data: st.DataObject, budget: int) -> None:
        """Give a request up, mostly one that has begun."""
        self._step(budget)
        if not self.engine.busy:
            return
        request = _pick(data, self.scheduler.running or self.scheduler.waiting)
        self._ask(request)
        self.seen["aborts of running requests" if request.ring is not None else "aborts of waiting requests"] += 1
        assert self.scheduler.abort(request.request_id)

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
        ran_before, evicted = self.scheduler.running, self.tree.statistics.evicted_pages if self.tree else 0
        results = self.engine.step()
        for result in results:
            request = result.request
            request.rows |= {p: r for p, r in zip(result.positions, result.logits, strict=True) if self._exact(request, p)}
            if request not in ran_before and request.num_shared_tokens:
                self.seen["hits"] += 1
                self.seen["tokens found"] += request.num_shared_tokens
                request.asked = True
            if request.rows and (request.asked or request.all_computed):
                self._ask(request)
        self.seen["steps"] += 1
        self.seen["steps in which a request waited"] += bool(self.scheduler.waiting)
        if self.tree:
            self.seen["pages evicted to make room"] += self.tree.statistics.evicted_pages - evicted
        self.check()

    def _exact(self, request: Driven, position: int) -> bool:
        """Whether a row equals a cold run's: all that are not run again, or behind a cut decoder all from the last."""
        if request.logits == "all" or self.setting.replay == "full":
            return position >= request.num_shared_tokens
        return position >= request.num_prompt_tokens - 1

    def _ask(self, request: Driven) -> None:
        """Compare the rows that came so far with the oracle's."""
        if request.rows:
            positions, expected = sorted(request.rows), self.oracle.of(tuple(request.token_ids))
            own, cold = torch.stack([request.rows[p] for p in positions]), expected.logits[positions]
            off = ~((own - cold).norm(dim=1) <= TOLERANCE * cold.norm(dim=1))  # NaN is off
            doubtful = expected.doubtful[positions]
            wrong = [p for p, bad in zip(positions, off & ~doubtful, strict=True) if bad]
            assert not wrong, f"logits: rows {wrong} of request {request.request_id} are not those of a cold run"
            self.seen["rows"] += len(positions)
            self.seen["rows excluded"] += int(off.sum())
            self.seen["rows behind a close choice"] += int(doubtful.sum())
        request.rows, request.asked = {}, False

    def _poison_free(self) -> None:
        cache, free = self.runner.cache, self.pages._free
        for pool in (*cache.main.values(), *cache.index_keys.values()):
            pool[free] = torch.nan
        for pool in (*cache.window, *cache.pending.values()):
            pool[self.scheduler._free_rings] = torch.nan

    @invariant()
    def check(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        nodes = dict(published(self.tree)) if self.tree else {}
        held = Counter(page for request in running for page in request.pages) + Counter(node.page for node in nodes.values())
        free = [page for page in range(self.pages.num_pages) if not held[page]]
        assert sorted(self.pages._free) == free, "pages: free ones are not those that nobody holds"
        assert all(self.pages.holders(page) == held[page] for page in range(self.pages.num_pages)), "pages: counts"
        rings = [request.ring for request in running]
        assert sorted([*rings, *self.scheduler._free_rings]) == list(range(RINGS)), "rings: one holder each"
        assert all(request.ring is None and not request.pages for request in waiting), "waiting requests hold nothing"
        for request in running:
            assert len(request.pages) == self.pages.pages_for(request.max_total_tokens), "pages: as many as reserved"
            assert request.num_shared_tokens < request.num_prompt_tokens, "hits: the last row must run"
            self._check_owned(request, held)
        self._check_contents(nodes)

    def _check_owned(self, request: Driven, held: Counter[int]) -> None:
        """Pages that a request may still write belong to it alone."""
        begin = min(self.scheduler._least(request), request.num_computed_tokens) // self.pages.page_tokens
        begin = max(begin, request.num_shared_tokens // self.pages.page_tokens)
        assert all(held[page] == 1 for page in request.pages[begin:]), "pages: one that is written has another holder"

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
        if self.tree:
            self.tree.evict(self.pages.num_pages)
            assert len(self.tree) == 0, "tree: pages that nobody uses can be evicted"
        assert self.pages.num_free == self.pages.num_pages, "pages: all come back"
        assert self.scheduler.num_free_rings == RINGS, "rings: all come back"
