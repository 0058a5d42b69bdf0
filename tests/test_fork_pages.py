"""10,000 random steps of the scheduler over a memory that is played: arrivals, forks, aborts, drafts, evictions.

The memory of a position is a hash of all tokens up to it. So whatever a request will ever read can be compared with
what it must be: a page or ring that two write, or that was not copied when it had to be, is seen at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, count

import pytest
from minideepinfer.cache.pages import PageAllocator
from minideepinfer.cache.prefix_tree import PrefixTree, _Node
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import Scheduler

PAGE, WINDOW, DRAFT, NUM_PAGES, NUM_RINGS, LONGEST = 4, 3, 4, 24, 5, 40
RING, PAIRS = WINDOW + DRAFT + 1, DRAFT // 2 + 2


def histories(token_ids: list[int]) -> list[int]:
    """For each position a hash of the tokens up to it."""
    return list(accumulate(token_ids, lambda before, token: hash((before, token)), initial=0))[1:]


class PlayedMemory:
    """Rings, kept halves of pairs, and pages of a source of ratio 1 and of one of ratio 2."""

    def __init__(self, pages: PageAllocator) -> None:
        self.pages = pages
        self.rings = [[0] * RING for _ in range(NUM_RINGS)]
        self.halves = [[0] * PAIRS for _ in range(NUM_RINGS)]
        self.ones = [[0] * PAGE for _ in range(NUM_PAGES)]
        self.pairs = [[(0, 0)] * (PAGE // 2) for _ in range(NUM_PAGES)]
        self.copied_pages = 0

    def copy_ring(self, source: int, target: int) -> None:
        self.rings[target] = list(self.rings[source])
        self.halves[target] = list(self.halves[source])

    def copy_page(self, source: int, target: int) -> None:
        assert self.pages.holders(target) == 1
        self.ones[target] = list(self.ones[source])
        self.pairs[target] = list(self.pairs[source])
        self.copied_pages += 1

    def run(self, request: Request, number: int) -> None:
        """What `number` rows of a request write, and what they read of kept halves."""
        assert request.ring is not None
        start, now, ring = request.num_computed_tokens, histories(request.token_ids), request.ring
        for position in range(start, start + number):
            self.rings[ring][position % RING] = now[position]
            half = now[position - 1] if position > start else self.halves[ring][position // 2 % PAIRS]
            if position % 2 == 0:
                self.halves[ring][position // 2 % PAIRS] = now[position]
            if position >= request.num_shared_tokens:
                page = request.pages[position // PAGE]
                assert self.pages.holders(page) == 1, "a page is written that others hold"
                self.ones[page][position % PAGE] = now[position]
                if position % 2:
                    self.pairs[page][position % PAGE // 2] = (half, now[position])
        request.num_computed_tokens += number

    def check(self, request: Request, least: int) -> None:
        """All that a request may still read, be it after tokens from `least` on were taken back."""
        assert request.ring is not None
        end, now = request.num_computed_tokens, histories(request.token_ids)
        self.check_pages(request.pages, now[:end])
        for position in range(max(request.first_computed_token, min(end, least) - WINDOW + 1), end):
            assert self.rings[request.ring][position % RING] == now[position]
        for odd in (
            stop for stop in range(min(end, least), end + 1) if stop % 2 and stop > request.first_computed_token
        ):
            assert self.halves[request.ring][odd // 2 % PAIRS] == now[odd - 1]

    def check_pages(self, pages: list[int], now: list[int]) -> None:
        for position, value in enumerate(now):
            page = pages[position // PAGE]
            assert self.ones[page][position % PAGE] == value
            if position % 2:
                assert self.pairs[page][position % PAGE // 2] == (now[position - 1], value)


class Play:
    """Does one random thing after the other, and knows what must be true behind each."""

    def __init__(self, seed: int, *, prefix: bool) -> None:
        self.rng, self.ids, self.done = random.Random(seed), count(), Counter[str]()
        self.pages = PageAllocator(NUM_PAGES, PAGE)
        self.tree = PrefixTree(self.pages) if prefix else None
        self.memory = PlayedMemory(self.pages)
        self.scheduler = Scheduler(
            self.pages,
            NUM_RINGS,
            max_tokens_per_step=6,
            max_positions=1000,
            decode_rows=DRAFT + 1,
            prefixes=self.tree,
            replay_start=lambda hit, prompt: max(0, hit - WINDOW),
            copies=self.memory,
        )
        self.alive: dict[int, Request] = {}

    def tokens(self, number: int) -> list[int]:
        return self.rng.choices((0, 1), (9, 1), k=number)

    def add(self) -> None:
        if len(self.alive) < 9:
            prompt = self.rng.randint(1, 28)
            request = Request(next(self.ids), self.tokens(prompt), prompt, self.rng.randint(prompt, LONGEST))
            self.scheduler.add(request)
            self.alive[request.request_id] = request

    def fork(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            if not self.alive or len(self.alive) >= 9:
                return
            parent = self.rng.choice(list(self.alive.values()))
            child, before = parent.twin(next(self.ids)), self.scheduler.memory.forks.forks
            used = self.pages.num_pages - self.pages.num_free
            self.scheduler.fork(parent, child)
            self.alive[child.request_id] = child
            state = "waiting" if parent.ring is None else "in its prompt" if parent.in_prompt else "behind its prompt"
            self.done[f"forked while {state}"] += 1
            if self.scheduler.memory.forks.forks > before:
                self.check_fork(parent, child, used)

    def check_fork(self, parent: Request, child: Request, used: int) -> None:
        shared = self.scheduler._least(parent) // PAGE
        assert child.pages[:shared] == parent.pages[:shared]
        assert not set(child.pages[shared:]) & set(parent.pages)
        assert parent.num_computed_tokens - shared * PAGE <= DRAFT + PAGE, "what is copied does not grow"
        if self.tree is None:
            assert self.pages.num_pages - self.pages.num_free == used + len(child.pages) - shared

    def abort(self) -> None:
        if self.alive:
            gone = self.alive.pop(self.rng.choice(list(self.alive)))
            self.done["gave a parent up"] += any(fork.parent is gone for fork in self.scheduler.pending_forks)
            assert self.scheduler.abort(gone.request_id)
            assert (gone.ring, gone.pages) == (None, [])

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        assert bool(scheduled) == bool(self.alive), "somebody could run and nobody did"
        if sum(item.num_new_tokens for item in scheduled) < self.scheduler.max_tokens_per_step:
            self.check_that_the_first_cannot_be_admitted()
        for item in scheduled:
            self.memory.run(item.request, item.num_new_tokens)
        for item in scheduled:
            self.scheduler.publish(item.request)
            self.done["forked behind the prompt"] += len(self.scheduler.branch(item.request))
        for request in [*self.scheduler.running]:
            self.go_on(request)

    def check_that_the_first_cannot_be_admitted(self) -> None:
        """Pages are interchangeable: if there are enough of them, wherever they are, nobody waits for pages."""
        if self.scheduler.waiting and self.scheduler.num_free_rings:
            free = self.pages.num_free + (0 if self.tree is None else self.tree.evictable())
            assert free < self.pages.pages_for(self.scheduler.waiting[0].max_total_tokens)
            self.done["waited for pages"] += 1

    def go_on(self, request: Request) -> None:
        """What sampling would do: another token, or the end."""
        if request.all_computed and not request.in_prompt:
            if len(request.token_ids) < request.max_total_tokens:
                request.token_ids += self.tokens(1)
            else:
                self.scheduler.publish(request, complete=True)
                self.scheduler.abort(request.request_id)
                del self.alive[request.request_id]

    def draft(self) -> None:
        """Several tokens at once, of which some are taken back; perhaps more than once."""
        able = [r for r in self.scheduler.running if not r.in_prompt and len(r.token_ids) == r.num_computed_tokens + 1]
        if not able:
            return
        request = self.rng.choice(able)
        room = min(DRAFT, request.max_total_tokens - len(request.token_ids))
        request.token_ids += self.tokens(self.rng.randint(0, room))
        self.memory.run(request, len(request.token_ids) - request.num_computed_tokens)
        self.scheduler.publish(request)
        for _ in range(self.rng.randint(1, 2)):
            least = self.scheduler._least(request)
            self.scheduler.truncate(request, self.rng.randint(least, len(request.token_ids)))
            self.done["went back"] += 1
        self.go_on(request)

    def evict(self) -> None:
        if self.tree is not None:
            self.done["evicted"] += self.tree.evict(self.rng.randint(1, 3))

    def check(self) -> None:
        """Every page is counted once for each holder, nothing is lost, and everybody reads what is theirs."""
        scheduler, pages = self.scheduler, self.pages
        holding = [*scheduler.running, *(fork for fork in scheduler.pending_forks if fork.ring is not None)]
        rings = [request.ring for request in holding]
        assert len(set(rings)) == len(rings) == NUM_RINGS - scheduler.num_free_rings
        held = Counter(page for request in holding for page in request.pages)
        nodes = list(self.nodes())
        held.update(page for page, _ in nodes)
        assert [pages.holders(page) for page in range(NUM_PAGES)] == [held[page] for page in range(NUM_PAGES)]
        assert sorted(pages._free) == [page for page in range(NUM_PAGES) if not held[page]]
        everyone = [*scheduler.running, *scheduler.waiting, *scheduler.pending_forks]
        assert sorted(request.request_id for request in everyone) == sorted(self.alive)
        assert all((request.ring, request.pages) == (None, []) for request in scheduler.waiting)
        for request in scheduler.running:
            self.memory.check(request, scheduler._least(request))
            assert len(request.pages) == pages.pages_for(request.max_total_tokens)
            writable = request.pages[scheduler._least(request) // PAGE :]
            assert all(pages.holders(page) == 1 for page in writable), "others hold what may be written"
        for page, now in nodes:
            self.memory.check_pages([page], now)

    def nodes(self) -> Iterator[tuple[int, list[int]]]:
        """Pages of the tree, and what they must hold."""
        stack: list[tuple[_Node, list[int]]] = [] if self.tree is None else [(self.tree._root, [])]
        while stack:
            node, before = stack.pop()
            ids = [*before, *node.edge]
            if node.parent is not None:
                yield node.page, histories(ids)[-PAGE:]
            stack += [(child, ids) for child in node.children.values()]


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix cache", "no prefix cache"])
def test_10000_steps_with_forks_lose_and_mix_up_nothing(prefix: bool) -> None:
    play = Play(7, prefix=prefix)
    things = {play.add: 2, play.fork: 3, play.abort: 1.5, play.step: 12, play.draft: 4, play.evict: 0.3}
    for thing in play.rng.choices(list(things), list(things.values()), k=10_000):
        thing()
        play.check()
    forks = play.scheduler.memory.forks
    print(f"{dict(play.done)}, {forks}")
    assert forks.copied_pages == play.memory.copied_pages
    assert min(forks.forks, forks.started_over, forks.shared_pages, play.done["gave a parent up"]) > 50
    assert play.done["waited for pages"] > 50
    assert min(play.done[f"forked while {state}"] for state in ("waiting", "in its prompt", "behind its prompt")) > 50
    if play.tree is not None:
        assert min(play.tree.statistics.hits, play.tree.statistics.evicted_pages, play.done["evicted"]) > 50
    while play.alive:
        play.step()
        play.check()
    if play.tree is not None:
        play.tree.evict(NUM_PAGES)
    assert (play.pages.num_free, play.scheduler.num_free_rings) == (NUM_PAGES, NUM_RINGS)
