"""Who holds which page of the global pools. One page number means the same page in every layer's pool."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out numbers of equal, exclusive pages.

    Attributes:
        num_pages: pages in the pool.
        page_tokens: tokens that a page holds.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        """Start with every page free."""
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = list(reversed(range(num_pages)))
        self._held = [False] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-num_tokens // self.page_tokens)

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages; the caller has seen that there are so many."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._held[page] = True
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages that were taken."""
        for page in pages:
            assert self._held[page], f"page {page} is given back but nobody holds it"
            self._held[page] = False
            self._free.append(page)
