"""Requests that go on from another one: equal to requests of their own, sharing what nobody writes, leaking nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from engine_fixtures import PAGE_TOKENS, poison, pools, runner_of, text_tokens
from minideepinfer.cache.pages import PageAllocator
from minideepinfer.checkpoint.size import cache_sizes
from minideepinfer.errors import RequestError
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.generation import Generation
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import ScheduledRequest, Scheduler
from test_cache import stored
from torch import Tensor

PROMPT, REST = 50, 17


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm(dim=-1).max() / b.norm(dim=-1).max())


class Forced:
    """Requests whose tokens are given, on a runner whose caches were NaN."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        poison(runner)
        cache, text = runner.engine_config.cache, runner.config.text_config
        pages = PageAllocator(cache.num_pages, cache.page_tokens)
        self.scheduler = Scheduler(
            pages, cache.max_requests, 4096, 4096, 1 + text.dspark_block_size, copies=runner.cache
        )
        self.requests: list[Request] = []

    def start(self, prompt: tuple[int, ...]) -> Request:
        request = Request(len(self.requests), list(prompt), len(prompt), 200, "kept")
        self.requests.append(request)
        self.scheduler.add(request)
        self.scheduler.schedule()
        self.run(request, len(prompt))
        return request

    def fork(self, parent: Request) -> Request:
        child = parent.twin(len(self.requests))
        self.requests.append(child)
        self.scheduler.fork(parent, child)
        return child

    def run(self, request: Request, count: int) -> Tensor:
        (result,) = self.runner.execute([ScheduledRequest(request, count)])
        return result.logits

    def extend(self, request: Request, ids: tuple[int, ...], chunk: int = 1) -> Tensor:
        """Logits of further tokens, so many in a step."""
        rows = []
        for begin in range(0, len(ids), chunk):
            request.token_ids += ids[begin : begin + chunk]
            rows.append(self.run(request, len(ids[begin : begin + chunk])))
        return torch.cat(rows)


@pytest.mark.parametrize(
    ("name", "replay", "layout", "decoded"),
    [
        *(("tiny-a", "full", "float32", decoded) for decoded in range(4)),
        ("tiny-a", "halo", "float32", 1),
        ("tiny-a", "bounded", "float32", 2),
        ("tiny-a", "bounded", "released", 3),
        ("tiny-a", "full", "released", 5),
        ("tiny-b", "bounded", "float32", 2),
    ],
)
def test_a_fork_goes_on_like_a_request_that_had_these_tokens_all_along(
    name: str, replay: str, layout: str, decoded: int
) -> None:
    prompt, first, own, theirs = (text_tokens(name, seed, n) for seed, n in ((1, PROMPT), (2, 9), (3, REST), (4, REST)))
    first = first[:decoded]
    quantization = "released" if layout == "released" else "none"
    runner = runner_of(name, quantization, replay, cache=(("layout", layout),))
    expected = []
    for rest in (own, theirs):
        alone = Forced(runner)
        request = alone.start(prompt)
        if first:
            alone.extend(request, first)
        expected.append(alone.extend(request, rest))
    played = Forced(runner)
    parent = played.start(prompt)
    if first:
        played.extend(parent, first)
    child = played.fork(parent)
    before, copied = stored(runner, parent), stored(runner, child)
    assert before.keys() == copied.keys()
    assert all(torch.equal(before[key], copied[key]) for key in before)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for mine, its in zip(own, theirs, strict=True):  # in turn, so that each could spoil the other
        found[0].append(played.extend(parent, (mine,)))
        found[1].append(played.extend(child, (its,)))
    assert torch.equal(torch.cat(found[0]), expected[0])
    assert torch.equal(torch.cat(found[1]), expected[1])


@pytest.mark.parametrize("decoded", [1, 2, 5, 6, 7, 8])
def test_a_fork_may_take_back_what_came_before_it(decoded: int) -> None:
    """Tokens of a draft block, also those of the parent, without a trace in either."""
    runner, prompt, draft = runner_of("tiny-a"), text_tokens("tiny-a", 1, PROMPT), text_tokens("tiny-a", 2, decoded)
    block = runner.config.text_config.dspark_block_size
    kept = max(0, decoded - block)
    rests = text_tokens("tiny-a", 3, 9), text_tokens("tiny-a", 4, 9)
    expected = []
    for tokens in (draft[:kept] + rests[0], draft + rests[1]):
        alone = Forced(runner)
        expected.append(alone.extend(alone.start(prompt), tokens)[-9:])
    played = Forced(runner)
    parent = played.start(prompt)
    played.extend(parent, draft, chunk=decoded if decoded <= block else 1)
    child = played.fork(parent)
    played.scheduler.truncate(child, PROMPT + kept)
    found = played.extend(child, rests[0]), played.extend(parent, rests[1])
    assert distance(found[0], expected[0]) < 1e-5
    assert distance(found[1], expected[1]) < 1e-5


def test_only_the_ring_and_the_last_page_are_copied() -> None:
    runner = runner_of("tiny-a")
    played = Forced(runner)
    parent = played.start(text_tokens("tiny-a", 1, PROMPT))
    played.extend(parent, text_tokens("tiny-a", 2, 8))
    cache, pages, size = runner.cache, played.scheduler.pages, PAGE_TOKENS["tiny-a"]
    before, used = [pool.clone() for pool in pools(runner)], pages.num_pages - pages.num_free
    child = played.fork(parent)
    least = 58 - runner.config.text_config.dspark_block_size
    shared = least // size
    assert (shared, -(-58 // size)) == (6, 8)
    assert child.pages[:shared] == parent.pages[:shared]
    assert not set(child.pages[shared:]) & set(parent.pages)
    assert [pages.holders(page) for page in parent.pages[:8]] == [2] * 6 + [1] * 2
    assert pages.num_pages - pages.num_free == used + len(child.pages) - shared
    changed = 0
    for pool, old in zip(pools(runner), before, strict=True):
        same = (pool == old) | (pool.isnan() & old.isnan())
        places = {int(place) for place in torch.nonzero(~same.flatten(1).all(1)).flatten()}
        rings = len(pool) == runner.engine_config.cache.max_requests
        assert places == ({child.ring} if rings else set(child.pages[shared:8]))
        changed += len(places) * pool[0].nbytes
    assert changed == cache.ring_bytes + 2 * cache.page_bytes
    forks = played.scheduler.memory.forks
    assert (forks.forks, forks.shared_pages, forks.copied_pages, forks.started_over) == (1, 6, 2, 0)


def test_nobody_changes_the_bytes_of_another_one() -> None:
    runner = runner_of("tiny-a")
    played = Forced(runner)
    parent = played.start(text_tokens("tiny-a", 1, PROMPT))
    played.extend(parent, text_tokens("tiny-a", 2, 7))
    child = played.fork(parent)
    grandchild = played.fork(child)
    family = [parent, child, grandchild]

    def bytes_of(request: Request) -> list[Tensor]:
        rings = runner.engine_config.cache.max_requests
        places = [request.ring if len(pool) == rings else request.pages for pool in pools(runner)]
        return [pool[place].clone() for pool, place in zip(pools(runner), places, strict=True)]

    for number, request in enumerate(family):
        others = [other for other in family if other is not request]
        before = [bytes_of(other) for other in others]
        played.extend(request, text_tokens("tiny-a", 10 + number, 30))
        for old, other in zip(before, others, strict=True):
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(old, bytes_of(other), strict=True)
            )
    for request in family:
        played.scheduler.abort(request.request_id)
    assert (played.scheduler.pages.num_free, played.scheduler.num_free_rings) == (64, 4)


@pytest.mark.parametrize("first", [0, 1])
def test_who_is_left_keeps_the_pages(first: int) -> None:
    runner, rest = runner_of("tiny-a"), text_tokens("tiny-a", 3, REST)
    alone = Forced(runner)
    expected = alone.extend(alone.start(text_tokens("tiny-a", 1, PROMPT)), rest)
    played = Forced(runner)
    parent = played.start(text_tokens("tiny-a", 1, PROMPT))
    pair = [parent, played.fork(parent)]
    played.scheduler.abort(pair.pop(first).request_id)
    other = played.start(text_tokens("tiny-a", 5, PROMPT))  # takes what was given back
    assert not set(other.pages) & set(pair[0].pages)
    assert torch.equal(played.extend(pair[0], rest), expected)


# Generations: draws, and where a fork comes in the life of its parent.


def engine(chunk: int = 4096, replay: str = "full", **cache: Any) -> Engine:
    runner = runner_of("tiny-a", replay=replay, cache=tuple(cache.items()), max_tokens_per_step=chunk)
    poison(runner)
    return Engine(runner)


def params(seed: int | None = None, **others: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": seed, "ignore_eos": True} | others)


def started(on: Engine, seed: int, prompt: int = PROMPT, **others: Any) -> Generation:
    generation = on.make_generation(text_tokens("tiny-a", 1, prompt), params(seed, **others))
    on.start(generation)
    return generation


@cache
def alone(seed: int, replay: str = "full", **others: Any) -> list[int]:
    """Tokens of a request that has the engine for itself."""
    on = engine(replay=replay)
    generation = started(on, seed, **others)
    while generation.finish_reason is None:
        on.step()
    return generation.token_ids


def finish(on: Engine, generations: list[Generation]) -> list[list[int]]:
    while any(generation.finish_reason is None for generation in generations):
        on.step()
    assert_nothing_is_held(on)
    return [generation.token_ids for generation in generations]


def assert_nothing_is_held(on: Engine) -> None:
    scheduler = on.scheduler
    assert scheduler.running == scheduler.waiting == scheduler.pending_forks == ()
    kept = 0 if on.prefixes is None else len(on.prefixes)
    assert scheduler.pages.num_free + kept == scheduler.pages.num_pages
    assert scheduler.num_free_rings == on.runner.engine_config.cache.max_requests
    assert not on._generations and not on.busy


SEEDS = [5, 6, 7, 8]


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["while waiting", "in the prompt", "at its end"])
@pytest.mark.parametrize("prefix", [False, True])
def test_forks_of_a_prompt_are_requests_of_their_own_with_these_seeds(steps: int, prefix: bool) -> None:
    on = engine(chunk=20, prefix=prefix)
    parent = started(on, SEEDS[0])
    for _ in range(steps):
        on.step()
    children = on.fork(parent, SEEDS[1:])
    assert len(on.scheduler.pending_forks) == 3
    assert all(child.num_tokens == 0 for child in children)
    assert finish(on, [parent, *children]) == [alone(seed) for seed in SEEDS]
    assert on.scheduler.memory.forks.forks == 3
    assert on.work.encoder_rows == PROMPT + 4 * 11, "the prompt is computed once"
    assert on.work.layer_rows == 9 * on.work.encoder_rows


@pytest.mark.parametrize("steps", [1, 4, 11])
def test_forks_in_the_middle_draw_what_their_seed_gives_from_there_on(steps: int) -> None:
    on = engine()
    parent = started(on, 5)
    for _ in range(steps):
        on.step()
    known = list(parent.token_ids)
    assert len(known) == steps
    children = on.fork(parent, [5, 6, 6])
    found = finish(on, [parent, *children])
    assert found[0] == found[1] == alone(5), "as if it had never been forked, and the same again"
    assert found[2] == found[3] != found[0]
    assert [ids[:steps] for ids in found] == [known] * 4
    oracle = engine()  # a request of its own with the other seed, which happened to draw the same first tokens
    generation = started(oracle, 6)
    replayed = iter(known)
    sample = generation._sampler.sample

    def forced(logits: Tensor, forbidden: tuple[int, ...] = ()) -> int:
        drawn = sample(logits, forbidden)
        return next(replayed, drawn)

    generation._sampler.sample = forced  # type: ignore[method-assign]
    assert finish(oracle, [generation]) == [found[2]]


def test_forks_without_seeds_draw_by_themselves() -> None:
    on = engine()
    parent = started(on, 5)
    found = finish(on, [parent, *on.fork(parent, [None, None])])
    assert found[0] == alone(5)
    assert found[0] != found[1] != found[2] != found[0]


def test_forks_of_forks() -> None:
    on = engine(chunk=20)
    parent = started(on, 5)
    (child,) = on.fork(parent, [6])
    (grandchild,) = on.fork(child, [7])
    on.step()
    (another,) = on.fork(grandchild, [8])
    assert finish(on, [parent, child, grandchild, another]) == [alone(seed) for seed in SEEDS]
    on = engine()
    parent = started(on, 5)
    on.step()
    (child,) = on.fork(parent, [5])
    on.step()
    (grandchild,) = on.fork(child, [5])
    assert finish(on, [parent, child, grandchild]) == [alone(5)] * 3


@pytest.mark.parametrize("cache", [{"max_requests": 1}, {"num_pages": 9}, {"num_pages": 8, "prefix": True}], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_without_memory_a_fork_waits_and_ends_alike(steps: int, cache: dict[str, Any]) -> None:
    on = engine(**cache)
    parent = started(on, 5)
    for _ in range(steps):
        on.step()
    children = on.fork(parent, [5, 5] if steps else SEEDS[1:3])
    on.step()
    assert on.scheduler.memory.forks.started_over >= 1 and on.scheduler.waiting
    wanted = [5, 5, 5] if steps else SEEDS[:3]
    assert finish(on, [parent, *children]) == [alone(seed) for seed in wanted]


def test_memory_is_kept_ready_for_the_forks_of_a_prompt() -> None:
    """Else requests that wait would take it, and every fork would compute the prompt again."""
    on = engine()
    seeds = (5, 15, 25)
    parents = [started(on, seed) for seed in seeds]
    children = [
        fork for parent, seed in zip(parents, seeds, strict=True) for fork in on.fork(parent, [seed + 1, seed + 2])
    ]
    on.step()
    assert on.scheduler.running == tuple(g.request for g in (*parents[:2], *children[:2])), "the third one waits"
    assert on.scheduler.memory.forks.forks == 2
    found = finish(on, [*parents, *children])
    assert found == [alone(seed) for seed in (*seeds, 6, 7, 16, 17, 26, 27)]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parent_that_is_given_up_in_its_prompt_leaves_its_forks(steps: int) -> None:
    on = engine(chunk=20)
    parent = started(on, 5)
    children = on.fork(parent, [6, 7])
    for _ in range(steps):
        on.step()
    on.abort(parent)
    assert (parent.finish_reason, parent.token_ids) == ("abort", [])
    assert finish(on, children) == [alone(6), alone(7)]
    assert on.scheduler.memory.forks.started_over == 2


def test_a_fork_that_is_given_up_in_the_prompt_leaves_the_others() -> None:
    on = engine(chunk=20)
    parent = started(on, 5)
    child, other = on.fork(parent, [6, 7])
    on.step()
    on.abort(child)
    assert child.finish_reason == "abort"
    assert finish(on, [parent, other]) == [alone(5), alone(7)]
    assert on.scheduler.memory.forks.forks == 1


def test_a_parent_may_end_with_the_token_at_which_its_forks_begin() -> None:
    on = engine()
    parent = started(on, 5, max_tokens=1)
    children = on.fork(parent, [6, 7])
    on.step()
    assert_nothing_is_held(on)
    assert [g.token_ids for g in (parent, *children)] == [alone(seed)[:1] for seed in SEEDS[:3]]
    on, stop = engine(), alone(5)[0]
    parent = started(on, 5, stop_token_ids=stop)
    children = on.fork(parent, [6, 7])
    on.step()
    assert parent.finish_reason == "stop"
    assert finish(on, children) == [alone(seed, stop_token_ids=stop) for seed in (6, 7)]
    on = engine(max_requests=1)
    parent = started(on, 5, max_tokens=1)
    finish(on, [parent, *on.fork(parent, [6, 7])])
    assert on.work.encoder_rows == PROMPT, "those that lack memory have their token and need none"


def test_what_has_ended_or_is_not_here_is_refused() -> None:
    on = engine()
    parent = started(on, 5, max_tokens=2)
    with pytest.raises(RequestError, match="sampling parameters: seed"):
        on.fork(parent, [6, -1])
    with pytest.raises(RequestError, match="has not ended yet"):
        parent.output()
    finish(on, [parent])
    with pytest.raises(RequestError, match=r"has ended \(length\) and cannot be forked; start another one"):
        on.fork(parent, [6])
    on.abort(parent)
    assert parent.finish_reason == "length"
    given_up = started(on, 5)
    on.abort(given_up)
    with pytest.raises(RequestError, match=r"has ended \(abort\)"):
        on.fork(given_up, [6])
    elsewhere, here = started(engine(), 5), started(on, 6)
    elsewhere.request.request_id = here.request.request_id
    for call in (lambda: on.fork(elsewhere, [6]), lambda: on.abort(elsewhere)):
        with pytest.raises(RequestError, match="was not started on this model"):
            call()
    on.abort(here)
    assert_nothing_is_held(on)


def test_a_step_that_fails_gives_up_the_forks_that_were_to_come_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on = engine(chunk=20, max_requests=2)
    parent, later = started(on, 5), started(on, 9)
    children, waiting = on.fork(parent, [6, 7]), on.fork(later, [10])
    on.step()
    with monkeypatch.context() as patch:
        patch.setattr(on.runner.model, "forward", None)
        with pytest.raises(TypeError):
            on.step()
    assert [g.finish_reason for g in (parent, *children)] == ["abort"] * 3
    assert finish(on, [later, *waiting]) == [alone(9), alone(10)]


def test_log_probabilities_are_those_of_a_request_of_its_own() -> None:
    def of(generation: Generation) -> tuple[Any, Any]:
        output = generation.output()
        return output.logprobs, output.prompt_logprobs

    on = engine()
    single = started(on, 6, logprobs=1, prompt_logprobs=1)
    finish(on, [single])
    for chunk, settings in ((4096, {}), (20, {}), (20, {"max_requests": 1})):
        on = engine(chunk, **settings)
        parent = started(on, 5, logprobs=1, prompt_logprobs=1)
        on.step()
        children = on.fork(parent, [6]) if chunk < PROMPT else []
        on.step()
        (same,) = on.fork(parent, [5])
        finish(on, [parent, *children, same])
        assert of(same)[0] == [pytest.approx(entry, abs=1e-4) for entry in of(parent)[0]]
        for child in children:
            for found, wanted in zip(of(child), of(single), strict=True):
                assert len(found) == len(wanted)
                assert [entry or {} for entry in found] == [pytest.approx(entry or {}, abs=1e-4) for entry in wanted]


def test_what_a_fork_wrote_is_found_by_later_prompts() -> None:
    on = engine(prefix=True)
    parent = started(on, 5, max_tokens=20)
    on.step()
    children = on.fork(parent, [6])
    for ids in finish(on, [parent, *children]):
        assert on.prefixes is not None
        whole = [*text_tokens("tiny-a", 1, PROMPT), *ids]
        pages = on.prefixes.lookup(whole, len(whole))
        assert len(pages) == (PROMPT + 19) // PAGE_TOKENS["tiny-a"]
        on.scheduler.pages.give_back(pages)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_hit_may_be_forked(steps: int) -> None:
    """Pages of an earlier prompt, of the parent and of its forks side by side."""
    on = engine(replay="halo", prefix=True)
    finish(on, [started(on, 1, 140)])
    parent = started(on, 5, 140)
    for _ in range(steps):
        on.step()
    children = on.fork(parent, [5, 5] if steps else [6, 7])
    found = finish(on, [parent, *children])
    assert on.prefixes is not None and on.prefixes.statistics.hit_tokens == 136
    assert on.scheduler.memory.forks.shared_pages == 2 * 17
    assert found == [alone(seed, "halo", prompt=140) for seed in ((5, 5, 5) if steps else (5, 6, 7))]


def test_bounded_replay_may_be_forked() -> None:
    on = engine(replay="bounded")
    parent = started(on, 5)
    children = on.fork(parent, [6])
    on.step()
    children += on.fork(parent, [5])
    assert finish(on, [parent, *children]) == [alone(seed, "bounded") for seed in (5, 6, 5)]
    assert (on.work.encoder_rows, on.work.decoder_rows) == (PROMPT + 33, 16 + 33)
    assert on.work.layer_rows == 5 * (PROMPT + 33) + 4 * (16 + 33)


@pytest.mark.parametrize("layout", ["float32", "bf16", "released"])
@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_statistics_tell_the_bytes_of_checkpoint_size(name: str, layout: str) -> None:
    runner = runner_of(name, "released", cache=(("layout", layout),))
    found, size = Engine(runner).cache_statistics, cache_sizes(runner.config.text_config)[layout]
    assert (found.layout, found.prefix) == (layout, None)
    assert (found.bytes_per_token, found.bytes_per_request) == (size.bytes_per_token, size.bytes_per_request)
    assert found.num_bytes == 64 * PAGE_TOKENS[name] * size.bytes_per_token + 4 * size.bytes_per_request
    assert found.num_bytes == sum(pool.nbytes for pool in pools(runner))
