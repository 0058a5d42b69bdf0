"""What can be wrong with caches: each fault changes one thing, and the cache machine must notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from minideepinfer.cache import kv_cache
from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.cache.prefix_tree import PrefixTree
from minideepinfer.model.compressor import Compressor
from minideepinfer.model.rows import Rows
from minideepinfer.runtime import batching, engine, replay
from minideepinfer.runtime.memory import RequestMemory
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import Scheduler
from pytest import MonkeyPatch

Fault = Callable[[MonkeyPatch], None]


def an_unfinished_page_is_published(patch: MonkeyPatch) -> None:
    publish = RequestMemory.publish

    def early(self: RequestMemory, request: Request, num_tokens: int) -> None:
        publish(self, request, min(len(request.token_ids), num_tokens + self.pages.page_tokens - 1))

    patch.setattr(RequestMemory, "publish", early)


def tokens_that_may_be_taken_back_are_published(patch: MonkeyPatch) -> None:
    def at_once(self: Scheduler, request: Request, *, complete: bool = False) -> None:
        self.memory.publish(request, request.num_computed_tokens)

    patch.setattr(Scheduler, "publish", at_once)


def an_aborted_prompt_is_published(patch: MonkeyPatch) -> None:
    abort = Scheduler.abort

    def publishing(self: Scheduler, request_id: int) -> bool:
        for request in self.running:
            if request.request_id == request_id:
                self.memory.publish(request, request.num_prompt_tokens)
        return abort(self, request_id)

    patch.setattr(Scheduler, "abort", publishing)


def a_hit_compares_only_how_a_page_begins(patch: MonkeyPatch) -> None:
    def edges(self: PrefixTree, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self._pages.page_tokens
        return (tuple(token_ids[i : i + 1]) * size for i in range(0, len(token_ids) - size + 1, size))

    patch.setattr(PrefixTree, "_edges", edges)


def a_page_in_use_is_evicted(patch: MonkeyPatch) -> None:
    def lookup(self: PrefixTree, token_ids: Sequence[int], most: int) -> list[int]:
        return [node.page for node in self._path(token_ids, most)]  # without holding them

    patch.setattr(PrefixTree, "lookup", lookup)


def a_page_is_evicted_before_those_behind_it(patch: MonkeyPatch) -> None:
    def is_free(self: PrefixTree, node: Any) -> bool:
        return node is not self._root and self._pages.holders(node.page) == 1

    def drop(self: PrefixTree, node: Any) -> None:
        if node.parent.children.pop(node.edge, None) is not None:
            self._pages.give_back([node.page])

    patch.setattr(PrefixTree, "_is_free_leaf", is_free)
    patch.setattr(PrefixTree, "_drop", drop)


def replayed_rows_write_shared_entries(patch: MonkeyPatch) -> None:
    pack = Rows.pack.__func__  # type: ignore[attr-defined]
    patch.setattr(Rows, "pack", classmethod(lambda cls, *given: pack(cls, *given[:7])))


def a_hit_runs_no_row_again(patch: MonkeyPatch) -> None:
    patch.setattr(engine, "replay_start", lambda config, kind, hit, prompt: hit)


def a_hit_runs_a_window_too_few_again(patch: MonkeyPatch) -> None:
    start = replay.replay_start

    def late(config: Any, kind: str, hit: int, prompt: int) -> int:
        first = start(config, kind, hit, prompt)
        return min(hit, first + config.sliding_window) if first else 0

    patch.setattr(engine, "replay_start", late)


def the_window_before_the_tail_is_not_rebuilt(patch: MonkeyPatch) -> None:
    """As it was until this machine came: the candidate source reads a whole window before the decoder's first row."""

    def late(config: Any, kind: str, hit: int, prompt: int) -> int:
        first, tail = replay.replay_start(config, kind, hit, prompt), replay.tail_rows(config, kind)
        if tail is None or not first:
            return first
        return max(0, min(hit, prompt - tail) - (config.sliding_window - 1) * config.candidate_source_layer_id)

    patch.setattr(engine, "replay_start", late)


def engram_forgets_the_tokens_before_a_hit(patch: MonkeyPatch) -> None:
    history = batching._history

    def short(part: Any, depth: int) -> Any:
        known = history(part, depth)
        before = np.arange(part.start, part.end)[:, None] - np.arange(depth) < part.request.num_shared_tokens
        return np.where(before & (np.arange(depth) > 0), -1, known)

    patch.setattr(batching, "_history", short)


def a_rejected_row_overwrites_a_ring_slot_that_is_needed(patch: MonkeyPatch) -> None:
    patch.setattr(kv_cache, "ring_size", lambda config: config.sliding_window + 1)


def a_pending_pair_is_not_restored(patch: MonkeyPatch) -> None:
    patch.setattr(kv_cache, "pair_slots", lambda config: 1)


def a_pending_pair_is_not_kept_at_all(patch: MonkeyPatch) -> None:
    pool = Compressor._pool

    def forgetful(pair: Any, entries: Any, pending: Any) -> Any:
        return pool(pair, entries, pending.clone())

    patch.setattr(Compressor, "_pool", staticmethod(forgetful))


def what_was_taken_back_may_be_taken_back_again(patch: MonkeyPatch) -> None:
    def least(self: Scheduler, request: Request) -> int:
        return max(request.num_prompt_tokens, request.num_computed_tokens - (self.decode_rows - 1))

    patch.setattr(Scheduler, "_least", least)


def a_fork_shares_the_last_page(patch: MonkeyPatch) -> None:
    def one_more(self: Scheduler, request: Request) -> int:
        return min(self.pages.pages_for(request.num_computed_tokens), len(request.pages) - 1)

    patch.setattr(Scheduler, "_final_pages", one_more)


def a_fork_does_not_copy_its_pages(patch: MonkeyPatch) -> None:
    patch.setattr(KVCache, "copy_page", lambda self, source, target: None)


def a_fork_does_not_copy_its_ring(patch: MonkeyPatch) -> None:
    patch.setattr(KVCache, "copy_ring", lambda self, source, target: None)


def pages_of_an_aborted_request_leak(patch: MonkeyPatch) -> None:
    def release(self: RequestMemory, request: Request) -> None:
        if request.ring is not None:
            self._free_rings.append(request.ring)
            if request.all_computed:
                self.pages.give_back(request.pages)
            request.ring, request.pages = None, []

    patch.setattr(RequestMemory, "release", release)


FAULTS: tuple[Fault, ...] = (
    an_unfinished_page_is_published,
    tokens_that_may_be_taken_back_are_published,
    an_aborted_prompt_is_published,
    a_hit_compares_only_how_a_page_begins,
    a_page_in_use_is_evicted,
    a_page_is_evicted_before_those_behind_it,
    replayed_rows_write_shared_entries,
    a_hit_runs_no_row_again,
    a_hit_runs_a_window_too_few_again,
    the_window_before_the_tail_is_not_rebuilt,
    engram_forgets_the_tokens_before_a_hit,
    a_rejected_row_overwrites_a_ring_slot_that_is_needed,
    a_pending_pair_is_not_restored,
    a_pending_pair_is_not_kept_at_all,
    what_was_taken_back_may_be_taken_back_again,
    a_fork_shares_the_last_page,
    a_fork_does_not_copy_its_pages,
    a_fork_does_not_copy_its_ring,
    pages_of_an_aborted_request_leak,
)
IN_HALO_ONLY = (the_window_before_the_tail_is_not_rebuilt,)
"""Faults that are none in other kinds of replay."""
