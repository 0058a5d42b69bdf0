"""Global entries of earlier prompts, found again by their token ids: a radix tree whose edges are whole pages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minideepinfer.cache.pages import PageAllocator

Edge = tuple[int, ...]
"""The token ids of one page. Edges are compared whole, so different tokens can never be taken for each other."""


@dataclass
class PrefixStatistics:
    """Totals since the start.

    Attributes:
        lookups: prompts that were admitted, also those that run whole because all their logits are wanted.
        hits: of them, those with at least one page.
        lookup_tokens: their tokens.
        hit_tokens: of them, those that were found.
        evicted_pages: pages given back for others.
    """

    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0

    def count(self, prompt: int, hit: int) -> None:
        """Count a prompt that was admitted, and how many of its tokens were found."""
        self.lookups += 1
        self.hits += bool(hit)
        self.lookup_tokens += prompt
        self.hit_tokens += hit


@dataclass(eq=False)
class _Node:
    page: int
    parent: _Node | None
    edge: Edge
    used: int = 0
    children: dict[Edge, _Node] = field(default_factory=dict)


class PrefixTree:
    """Holds complete pages of published prompts, and gives the least recently used ones back when asked to.

    What is in a page depends on all tokens before it, so a page is found only along the path of exactly these tokens.
    A tree belongs to one engine: another checkpoint, configuration or plan has a tree and pools of its own.

    Attributes:
        statistics: see `PrefixStatistics`.
    """

    def __init__(self, pages: PageAllocator) -> None:
        """Start empty."""
        self.statistics = PrefixStatistics()
        self._pages = pages
        self._root = _Node(-1, None, ())
        self._now = 0

    def __len__(self) -> int:
        """Pages that the tree holds."""
        return sum(1 for _ in self._nodes())

    def lookup(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Find the longest known prefix, and hold its pages for the caller.

        Args:
            token_ids: a prompt.
            most: tokens that may be found, at most.

        Returns:
            Its pages in order, each holding `page_tokens` tokens; the caller gives them back.
        """
        path = list(self._path(token_ids, most))
        self._touch(path)
        pages = [node.page for node in path]
        self._pages.share(pages)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Publish complete pages; the tree holds those that it does not know yet.

        Args:
            token_ids: `[len(pages) * page_tokens]`, the tokens from position 0 on.
            pages: hold the entries of exactly these tokens, every one written by a step that ended well.
        """
        assert len(token_ids) == len(pages) * self._pages.page_tokens, "only whole pages are published"
        node, path = self._root, []
        for edge, page in zip(self._edges(token_ids), pages, strict=True):
            if edge not in node.children:
                self._pages.share([page])
                node.children[edge] = _Node(page, node, edge)
            node = node.children[edge]
            path.append(node)
        self._touch(path)

    def evict(self, count: int) -> int:
        """Give pages back that only the tree holds, least recently used first, until `count` more are free.

        Returns:
            Pages given back; fewer than `count` if all others are in use.
        """
        leaves = [(node.used, node.page, node) for node in self._nodes() if self._is_free_leaf(node)]
        heapq.heapify(leaves)
        given = 0
        while given < count and leaves:
            *_, node = heapq.heappop(leaves)
            self._drop(node)
            given += 1
            if (parent := node.parent) is not None and self._is_free_leaf(parent):
                heapq.heappush(leaves, (parent.used, parent.page, parent))
        self.statistics.evicted_pages += given
        return given

    def evictable(self) -> int:
        """Pages that `evict` could free: those that only the tree holds, as all behind them."""
        held: set[_Node | None] = set()
        nodes = list(self._nodes())
        for node in reversed(nodes):  # children before their parents
            if node in held or self._pages.holders(node.page) > 1:
                held |= {node, node.parent}
        return sum(node not in held for node in nodes)

    def _edges(self, token_ids: Sequence[int]) -> Iterator[Edge]:
        size = self._pages.page_tokens
        return (tuple(token_ids[begin : begin + size]) for begin in range(0, len(token_ids) - size + 1, size))

    def _path(self, token_ids: Sequence[int], most: int) -> Iterator[_Node]:
        node = self._root
        for edge in self._edges(token_ids[:most]):
            if edge not in node.children:
                return
            node = node.children[edge]
            yield node

    def _touch(self, path: Sequence[_Node]) -> None:
        self._now += 1
        for node in path:
            node.used = self._now

    def _is_free_leaf(self, node: _Node) -> bool:
        return node is not self._root and not node.children and self._pages.holders(node.page) == 1

    def _drop(self, node: _Node) -> None:
        assert node.parent is not None and not node.children
        del node.parent.children[node.edge]
        self._pages.give_back([node.page])

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
