"""The radix tree of published pages, and the counts of who holds a page, under random use."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from minideepinfer.cache.pages import PageAllocator
from minideepinfer.cache.prefix_tree import PrefixTree

SIZE = 2


def filled(*prompts: list[int], num_pages: int = 16) -> tuple[PageAllocator, PrefixTree, list[list[int]]]:
    """A tree that holds whole prompts, whose requests are gone."""
    pages = PageAllocator(num_pages, SIZE)
    tree, taken = PrefixTree(pages), []
    for ids in prompts:
        taken.append(pages.take(len(ids) // SIZE))
        tree.insert(ids, taken[-1])
        pages.give_back(taken[-1])
    return pages, tree, taken


def test_a_lookup_finds_the_longest_prefix_in_whole_pages_and_holds_it() -> None:
    pages, tree, (first, _) = filled([1, 2, 3, 4, 5, 6], [1, 2, 9, 9])
    assert tree.lookup([1, 2, 3, 4, 7, 7], 6) == first[:2]
    assert [pages.holders(page) for page in first] == [2, 2, 1]
    assert tree.lookup([1, 2, 3, 4, 5, 6], 5) == first[:2], "at most 5 tokens are two pages"
    assert tree.lookup([1, 3], 2) == []
    assert tree.lookup([], 0) == []
    assert len(tree) == 4, "the second prompt shares its first page with the first"


def test_what_a_page_holds_depends_on_all_tokens_before_it() -> None:
    _, tree, _ = filled([1, 2, 3, 4])
    assert tree.lookup([3, 4], 2) == []
    assert tree.lookup([9, 9, 3, 4], 4) == []


def test_ids_with_equal_hashes_are_told_apart() -> None:
    assert hash((-1, 5)) == hash((-2, 5))
    _, tree, _ = filled([-1, 5])
    assert tree.lookup([-2, 5], 2) == []


def test_publishing_known_tokens_again_keeps_the_first_pages() -> None:
    pages, tree, (first,) = filled([1, 2, 3, 4])
    again = pages.take(2)
    tree.insert([1, 2, 3, 4], again)
    assert tree.lookup([1, 2, 3, 4], 4) == first
    assert [pages.holders(page) for page in again] == [1, 1]


def test_eviction_takes_the_least_recently_used_leaf_and_never_what_is_held() -> None:
    pages, tree, (old, new) = filled([1, 2, 3, 4], [5, 6, 7, 8], num_pages=4)
    tree.lookup([1, 2], 2)  # held from here on, and used after all others
    assert tree.evictable() == 3
    assert tree.evict(1) == 1
    assert pages.holders(old[1]) == 0, "used before the other leaf"
    assert tree.evict(9) == 2, "the page that is held stays"
    assert pages.holders(old[0]) == 2
    assert pages.num_free == 3
    assert tree.statistics.evicted_pages == 3
    assert new


def test_a_page_in_front_of_one_that_is_held_cannot_be_freed() -> None:
    pages, tree, _ = filled([1, 2])
    mine = pages.take(2)
    tree.insert([1, 2, 3, 4], mine)  # the first page is known: the second hangs below a page that I do not hold
    assert tree.evictable() == 0
    assert tree.evict(5) == 0
    pages.give_back(mine)
    assert tree.evictable() == 2


def test_half_a_page_is_never_published() -> None:
    pages, tree, _ = filled()
    with pytest.raises(AssertionError, match="whole pages"):
        tree.insert([1, 2, 3], pages.take(1))


class TreeMachine(RuleBasedStateMachine):
    """Requests over a small alphabet arrive, publish, fork and leave; a dictionary is the oracle of what is known."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pages = PageAllocator(num_pages, SIZE)
        self.tree = PrefixTree(self.pages)
        self.known: dict[tuple[int, ...], int] = {}
        self.running: list[list[int]] = []

    @rule(ids=st.lists(st.integers(0, 1), max_size=10), publish=st.booleans())
    def arrive(self, ids: list[int], publish: bool) -> None:
        expected = []
        for end in range(SIZE, len(ids) + 1, SIZE):
            if tuple(ids[:end]) not in self.known:
                break
            expected.append(self.known[tuple(ids[:end])])
        held = self.tree.lookup(ids, len(ids))
        assert held == expected
        rest = len(ids) // SIZE - len(held)
        if rest > self.pages.num_free:
            before = self.tree.evictable(), self.pages.num_free
            given = self.tree.evict(rest - self.pages.num_free)
            assert given == min(rest - before[1], before[0])
            self.known = {ids: page for ids, page in self.known.items() if self._in_tree(ids)}
        if rest > self.pages.num_free:
            self.pages.give_back(held)
            return
        held = held + self.pages.take(rest)
        self.running.append(held)
        if publish:
            self.tree.insert(ids[: len(held) * SIZE], held)
            for number, page in enumerate(held, 1):
                self.known.setdefault(tuple(ids[: number * SIZE]), page)

    def _in_tree(self, ids: tuple[int, ...]) -> bool:
        node = self.tree._root
        for begin in range(0, len(ids), SIZE):
            if ids[begin : begin + SIZE] not in node.children:
                return False
            node = node.children[ids[begin : begin + SIZE]]
        return True

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.running:
            pages = data.draw(st.sampled_from(self.running))
            self.pages.share(pages)
            self.running.append(list(pages))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.running:
            pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.pages.give_back(pages)

    @invariant()
    def every_page_is_counted_once_for_each_holder(self) -> None:
        if not hasattr(self, "pages"):
            return
        held = Counter(page for pages in self.running for page in pages) + Counter(self.known.values())
        assert {page: self.pages.holders(page) for page in range(self.pages.num_pages)} == {
            page: held[page] for page in range(self.pages.num_pages)
        }
        assert sorted(self.pages._free) == [page for page in range(self.pages.num_pages) if not held[page]]
        assert len(self.tree) == len(self.known)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=100, stateful_step_count=100, deadline=None)
