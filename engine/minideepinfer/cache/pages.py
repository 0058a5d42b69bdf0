"""Who holds which page of the global pools. One page number means the same page in every layer's pool."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out equal pages, counts who holds each, and frees a page when its last holder gives it back.

    Pages are interchangeable, so free ones always suffice for a request of as many: nothing fragments.

    Attributes:
        num_pages: pages in the pool.
        page_tokens: tokens that a page holds.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        """Start with every page free."""
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = list(reversed(range(num_pages)))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-num_tokens // self.page_tokens)

    def holders(self, page: int) -> int:
        """How many hold a page; who writes must be the only one."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages; the caller has seen that there are so many."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that somebody holds already."""
        for page in pages:
            assert self._holders[page], f"page {page} is shared but nobody holds it"
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Let go of pages that were taken or shared."""
        for page in pages:
            assert self._holders[page], f"page {page} is given back but nobody holds it"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
