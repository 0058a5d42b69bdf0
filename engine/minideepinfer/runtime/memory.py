"""What requests hold while they run: a window ring, and pages, some of them together with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from minideepinfer.cache.pages import PageAllocator
from minideepinfer.cache.prefix_tree import PrefixTree
from minideepinfer.runtime.request import Request


class Copies(Protocol):
    """Copies what a ring or a page holds in all layers, before anything that runs later reads or writes it."""

    def copy_ring(self, source: int, target: int) -> None:
        """Copy a ring."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page."""
        ...


class NoCopies:
    """`Copies` where no memory stands behind the numbers."""

    def copy_ring(self, source: int, target: int) -> None:
        """Nothing."""

    def copy_page(self, source: int, target: int) -> None:
        """Nothing."""


@dataclass
class ForkStatistics:
    """Totals since the start.

    Attributes:
        forks: requests that went on with the state of another one; each was given a copy of its ring.
        shared_pages: pages that they held together with it at that time.
        copied_pages: pages that were copied for them.
        started_over: forks that lacked a ring or pages, or whose parent was given up in its prompt; they compute all of
            their tokens themselves.
    """

    forks: int = 0
    shared_pages: int = 0
    copied_pages: int = 0
    started_over: int = 0


class RequestMemory:
    """Gives rings and pages to requests, and takes them back.

    Whoever writes a page is the only one that holds it. Pages that several hold (of a prefix, of forks) are complete,
    and no holder goes back into them.

    Attributes:
        pages: the page budget.
        forks: what forks shared and copied.
    """

    def __init__(
        self,
        pages: PageAllocator,
        num_rings: int,
        prefixes: PrefixTree | None,
        replay_start: Callable[[int, int], int],
        copies: Copies,
    ) -> None:
        """Start with everything free.

        Args:
            pages: the page budget.
            num_rings: window rings.
            prefixes: where prompts find pages of earlier ones; None = every prompt is computed whole.
            replay_start: of tokens found and tokens of the prompt, the first row to run; 0 = the hit saves nothing.
            copies: the memory behind rings and pages.
        """
        self.pages = pages
        self.forks = ForkStatistics()
        self._free_rings = list(reversed(range(num_rings)))
        self._prefixes = prefixes
        self._replay_start = replay_start
        self._copies = copies

    @property
    def num_free_rings(self) -> int:
        """Window rings that nobody holds."""
        return len(self._free_rings)

    def admit(self, request: Request) -> bool:
        """Give a request a ring and pages for all it will ever compute, the first ones of earlier prompts if it can.

        Returns:
            Whether there were enough; else it holds nothing.
        """
        if not self._free_rings:
            return False
        shared, start = self._find_prefix(request)
        if not self.reserve(request, len(shared)):
            self.pages.give_back(shared)
            return False
        request.pages = shared + request.pages
        request.num_shared_tokens = len(shared) * self.pages.page_tokens
        request.first_computed_token = request.num_computed_tokens = start
        if self._prefixes is not None:
            self._prefixes.statistics.count(request.num_prompt_tokens, request.num_shared_tokens)
        return True

    def reserve(self, request: Request, num_shared: int) -> bool:
        """Give a request a ring, and pages for all but the first `num_shared`.

        Returns:
            Whether there were enough; else it holds nothing.
        """
        needed = self.pages.pages_for(request.max_total_tokens) - num_shared
        if not self._free_rings or not self._make_free(needed):
            return False
        request.ring, request.pages = self._free_rings.pop(), self.pages.take(needed)
        return True

    def inherit(self, child: Request, parent: Request, num_shared: int) -> None:
        """Give a request what another one has computed.

        Args:
            child: holds what `reserve` gave it for the same `num_shared`.
            parent: a running request behind its prompt.
            num_shared: first pages that neither will ever write; they hold them together. What else holds anything, the
                ring and the pages behind, is copied.
        """
        assert child.ring is not None and parent.ring is not None
        assert len(child.pages) == self.pages.pages_for(child.max_total_tokens) - num_shared
        shared, used = parent.pages[:num_shared], self.pages.pages_for(parent.num_computed_tokens)
        self._copies.copy_ring(parent.ring, child.ring)
        for source, target in zip(parent.pages[num_shared:used], child.pages, strict=False):
            self._copies.copy_page(source, target)
        self.pages.share(shared)
        child.pages = shared + child.pages
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_shared_tokens = num_shared * self.pages.page_tokens
        child.first_computed_token = parent.first_computed_token
        child.num_published_pages = parent.num_published_pages
        child.num_final_tokens = parent.num_final_tokens
        self.forks.forks += 1
        self.forks.shared_pages += num_shared
        self.forks.copied_pages += used - num_shared

    def release(self, request: Request) -> None:
        """Take back what a request holds, if anything."""
        if request.ring is not None:
            self._free_rings.append(request.ring)
            self.pages.give_back(request.pages)
            request.ring, request.pages = None, []

    def publish(self, request: Request, num_tokens: int) -> None:
        """Offer pages that hold the first tokens of a request to later prompts.

        Args:
            request: holds them.
            num_tokens: were computed by steps that ended well, and stay.
        """
        count = num_tokens // self.pages.page_tokens
        if self._prefixes is not None and count > request.num_published_pages:  # most steps complete no page
            self._prefixes.insert(request.token_ids[: count * self.pages.page_tokens], request.pages[:count])
            request.num_published_pages = count

    def _find_prefix(self, request: Request) -> tuple[list[int], int]:
        """Pages of earlier prompts that begin this one, held, and its first row; at least its last token must run."""
        if self._prefixes is None or request.logits == "all":
            return [], 0
        pages = self._prefixes.lookup(request.token_ids, request.num_prompt_tokens - 1)
        start = self._replay_start(len(pages) * self.pages.page_tokens, request.num_prompt_tokens)
        if start:
            return pages, start
        self.pages.give_back(pages)
        return [], 0

    def _make_free(self, count: int) -> bool:
        """Evict until so many pages are free; nothing is evicted in vain."""
        lacking = count - self.pages.num_free
        if lacking > 0 and self._prefixes is not None and self._prefixes.evictable() >= lacking:
            self._prefixes.evict(lacking)
        return count <= self.pages.num_free
