"""The scheduler under random arrivals, aborts and steps, and its refusals."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from minideepinfer.cache.pages import PageAllocator
from minideepinfer.errors import RequestError
from minideepinfer.operators import Phase
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import ScheduledRequest, Scheduler


def make(num_pages: int = 8, num_rings: int = 3, budget: int = 16, positions: int = 1000) -> Scheduler:
    return Scheduler(PageAllocator(num_pages, 4), num_rings, budget, positions, decode_rows=3)


def request(request_id: int, prompt: int, known: int = 0, total: int = 0) -> Request:
    tokens = [0] * max(prompt, known)
    return Request(request_id, tokens, prompt, max(total, len(tokens)))


def advance(step: list[ScheduledRequest]) -> None:
    for scheduled in step:
        scheduled.request.num_computed_tokens += scheduled.num_new_tokens


def counts(step: list[ScheduledRequest]) -> list[tuple[int, int]]:
    return [(s.request.request_id, s.num_new_tokens) for s in step]


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the loop: runs each step's tokens, appends sampled ones, finishes requests at their total."""

    @initialize(pages=st.integers(1, 6), rings=st.integers(1, 3), budget=st.integers(1, 9))
    def start(self, pages: int, rings: int, budget: int) -> None:
        self.scheduler = make(pages, rings, budget, positions=20)
        self.rings, self.budget = rings, budget
        self.ids = count()
        self.arrived: list[Request] = []
        self.admitted: list[Request] = []
        self.alive: dict[int, Request] = {}

    @rule(prompt=st.integers(0, 22), forced=st.integers(0, 3), generated=st.integers(0, 5))
    def add(self, prompt: int, forced: int, generated: int) -> None:
        total = prompt + forced + generated
        new = Request(next(self.ids), [0] * (prompt + forced), prompt, total)
        possible = prompt > 0 and total <= 20 and -(-total // 4) <= self.scheduler.pages.num_pages
        if not possible:
            with pytest.raises(RequestError):
                self.scheduler.add(new)
            return
        self.scheduler.add(new)
        self.arrived.append(new)
        self.alive[new.request_id] = new

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.alive:
            assert not self.scheduler.abort(-1)
            return
        victim = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.scheduler.abort(victim)
        gone = self.alive.pop(victim)
        assert gone.ring is None
        assert gone.pages == []
        if gone not in self.admitted:
            self.arrived.remove(gone)

    @rule()
    def step(self) -> None:
        before = list(self.scheduler.running)
        step = self.scheduler.schedule()
        self.admitted += self.scheduler.running[len(before) :]
        assert list(self.scheduler.running[: len(before)]) == before
        assert self.admitted == self.arrived[: len(self.admitted)], "a later arrival overtook"
        assert bool(step) == bool(self.alive), "somebody could run and nobody did"
        self.check_step(step)
        advance(step)
        for scheduled in step:
            self.play(scheduled.request)

    def check_step(self, step: list[ScheduledRequest]) -> None:
        assert sum(s.num_new_tokens for s in step) <= self.budget
        assert len({s.request.request_id for s in step}) == len(step)
        phases = [s.phase(3) for s in step]
        assert phases == sorted(phases), "decode rows come first"
        for scheduled in step:
            taken, start = scheduled.request, scheduled.request.num_computed_tokens
            assert scheduled.num_new_tokens >= 1
            if start >= taken.num_prompt_tokens:
                assert scheduled.num_new_tokens == 1
            else:
                assert start + scheduled.num_new_tokens <= taken.num_prompt_tokens

    def play(self, done: Request) -> None:
        if done.num_computed_tokens < len(done.token_ids):
            return
        if len(done.token_ids) < done.max_total_tokens:
            done.token_ids.append(0)
        else:
            self.scheduler.abort(done.request_id)
            del self.alive[done.request_id]

    @invariant()
    def nothing_is_shared_or_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running, pages = self.scheduler.running, self.scheduler.pages
        held = [page for r in running for page in r.pages]
        assert len(set(held)) == len(held)
        assert len(held) + pages.num_free == pages.num_pages
        rings = [r.ring for r in running]
        assert None not in rings
        assert len(set(rings)) == len(rings)
        assert len(rings) + self.scheduler.num_free_rings == self.rings
        for r in running:
            assert len(r.pages) * pages.page_tokens >= r.max_total_tokens
        assert {r.request_id for r in (*running, *self.scheduler.waiting)} == set(self.alive)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        most = sum(r.max_total_tokens for r in self.alive.values())
        for _ in range(most):
            self.step()
        assert not self.alive, "a request never finished"
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_decode_first_then_prompts_in_order_within_the_budget() -> None:
    scheduler = make(num_pages=20, budget=10)
    for request_id, prompt in enumerate((6, 30, 5)):
        scheduler.add(request(request_id, prompt, known=prompt + 2))
    step = scheduler.schedule()
    assert counts(step) == [(0, 6), (1, 4)]
    advance(step)
    step = scheduler.schedule()
    assert counts(step) == [(0, 1), (1, 9)]
    assert [s.phase(3) for s in step] == [Phase.DECODE, Phase.PREFILL]
    advance(step)
    assert counts(scheduler.schedule()) == [(0, 1), (1, 9)]


def test_a_short_rest_of_a_prompt_is_decode_and_comes_first() -> None:
    scheduler = make(num_pages=20, budget=10)
    scheduler.add(request(0, 12))
    advance(scheduler.schedule())
    scheduler.add(request(1, 20))
    step = scheduler.schedule()
    assert counts(step) == [(0, 2), (1, 8)]
    assert [s.phase(3) for s in step] == [Phase.DECODE, Phase.PREFILL]


def test_teacher_forced_tokens_run_one_a_step_and_then_it_waits_for_a_token() -> None:
    scheduler = make()
    scheduler.add(request(0, 3, known=5, total=6))
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        seen.append(counts(step))
        advance(step)
    assert seen == [[(0, 3)], [(0, 1)], [(0, 1)], []]
    scheduler.running[0].token_ids.append(9)
    assert counts(scheduler.schedule()) == [(0, 1)]


def test_a_later_small_request_does_not_overtake_a_large_one() -> None:
    scheduler = make(num_pages=8, budget=100)
    for request_id, total in enumerate((20, 16, 4)):
        scheduler.add(request(request_id, total))
    advance(scheduler.schedule())
    assert [r.request_id for r in scheduler.running] == [0]
    scheduler.abort(scheduler.running[0].request_id)
    assert counts(scheduler.schedule()) == [(1, 16), (2, 4)]


def test_rings_queue_requests() -> None:
    scheduler = make(num_pages=8, num_rings=2, budget=100)
    for request_id in range(3):
        scheduler.add(request(request_id, 2))
    assert counts(scheduler.schedule()) == [(0, 2), (1, 2)]
    assert scheduler.abort(0)
    assert counts(scheduler.schedule()) == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(7, 40), r"request 7: needs 10 pages of 4 tokens for its 40 tokens, the pool has 8"),
        (request(7, 10, total=1001), r"needs 1001 positions \(10 given, 991 to come\), the model has 1000"),
        (request(7, 0), r"at least one prompt token"),
        (request(1, 4), r"ids must be unique"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(bad: Request, message: str) -> None:
    scheduler = make()
    scheduler.add(request(1, 4))
    with pytest.raises(RequestError, match=message):
        scheduler.add(bad)
    assert [r.request_id for r in scheduler.waiting] == [1]


def test_pages_are_exclusive() -> None:
    pages = PageAllocator(3, 4)
    first = pages.take(2)
    assert set(first) | set(pages.take(1)) == {0, 1, 2}
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pages.take(1)
    pages.give_back(first)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pages.give_back(first[:1])
