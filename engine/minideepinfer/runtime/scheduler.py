"""What the next step computes: first come, first served, within a token budget, a page budget and the window rings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from minideepinfer.cache.pages import PageAllocator
from minideepinfer.cache.prefix_tree import PrefixTree
from minideepinfer.errors import RequestError
from minideepinfer.operators.declaration import Phase
from minideepinfer.runtime.request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """A request's share of one step: its tokens from `num_computed_tokens` on.

    Attributes:
        request: whose tokens.
        num_new_tokens: how many, at least 1.
    """

    request: Request
    num_new_tokens: int

    def phase(self, decode_rows: int) -> Phase:
        """Decode = at most `decode_rows` rows behind a cached context, prefill = all else."""
        few = self.request.num_computed_tokens > 0 and self.num_new_tokens <= decode_rows
        return Phase.DECODE if few else Phase.PREFILL


class Scheduler:
    """Admits requests in order of arrival and shares each step's token budget among those that run.

    A request is admitted once pages for all it will ever compute and a window ring are free; a running one therefore
    never lacks memory, and a later arrival never overtakes an earlier one.
    """

    def __init__(
        self,
        pages: PageAllocator,
        num_rings: int,
        max_tokens_per_step: int,
        max_positions: int,
        decode_rows: int,
        prefixes: PrefixTree | None = None,
        replay_start: Callable[[int, int], int] = lambda hit, prompt: hit,
    ) -> None:
        """Start with nothing queued.

        Args:
            pages: the page budget.
            num_rings: window rings, the most requests that run together.
            max_tokens_per_step: most rows of one step.
            max_positions: positions the model has.
            decode_rows: most new rows behind a cached context that still count as decode.
            prefixes: where prompts find pages of earlier ones; None = every prompt is computed whole.
            replay_start: of tokens found and tokens of the prompt, the first row to run; 0 = the hit saves nothing.
        """
        self.pages = pages
        self.max_tokens_per_step = max_tokens_per_step
        self.max_positions = max_positions
        self.decode_rows = decode_rows
        self._prefixes = prefixes
        self._replay_start = replay_start
        self._free_rings = list(reversed(range(num_rings)))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold nothing yet, in order of arrival."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold pages and a ring, in order of arrival."""
        return tuple(self._running)

    @property
    def num_free_rings(self) -> int:
        """Window rings that nobody holds."""
        return len(self._free_rings)

    def check(self, request: Request) -> None:
        """Refuse what could never run.

        Raises:
            RequestError: the request is empty, its id is in use, or it exceeds the positions or the whole page pool.
        """
        name = f"request {request.request_id}"
        total, needed = request.max_total_tokens, self.pages.pages_for(request.max_total_tokens)
        if not 1 <= request.num_prompt_tokens <= len(request.token_ids) <= total:
            raise RequestError(
                f"{name}: {request.num_prompt_tokens} prompt tokens of {len(request.token_ids)} known and {total} in "
                "all; at least one prompt token is needed, and no part may exceed the whole"
            )
        if any(request.request_id == other.request_id for other in (*self._waiting, *self._running)):
            raise RequestError(f"{name}: another request with this id waits or runs; ids must be unique")
        if total > self.max_positions:
            raise RequestError(
                f"{name}: needs {total} positions ({len(request.token_ids)} given, {total - len(request.token_ids)} to "
                f"come), the model has {self.max_positions} (max_position_embeddings); shorten it or lower max_tokens"
            )
        if needed > self.pages.num_pages:
            raise RequestError(
                f"{name}: needs {needed} pages of {self.pages.page_tokens} tokens for its {total} tokens, the pool has "
                f"{self.pages.num_pages}; raise cache.num_pages, shorten it or lower max_tokens"
            )

    def add(self, request: Request) -> None:
        """Queue a request; others may be running.

        Raises:
            RequestError: see `check`; nothing was queued.
        """
        self.check(request)
        self._waiting.append(request)

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next step.

        Requests behind their prompt are served first, then prompts, each in order of arrival, then arrivals that can
        be admitted.

        Returns:
            At least one row if anything can be computed; decode rows first. Rows add up to at most the token budget.
        """
        budget = self.max_tokens_per_step
        chosen: list[ScheduledRequest] = []
        for request in sorted(self._running, key=lambda r: r.in_prompt):
            budget -= self._share(request, budget, chosen)
        while budget and self._admit_next():
            budget -= self._share(self._running[-1], budget, chosen)
        return sorted(chosen, key=lambda s: s.phase(self.decode_rows) is not Phase.DECODE)

    def finish(self, request: Request) -> None:
        """Free what a running request holds."""
        self._running.remove(request)
        assert request.ring is not None
        self._free_rings.append(request.ring)
        self.pages.give_back(request.pages)
        request.ring, request.pages = None, []

    def abort(self, request_id: int) -> bool:
        """Drop a request, wherever it is.

        Returns:
            Whether it waited or ran.
        """
        for request in self._running:
            if request.request_id == request_id:
                self.finish(request)
                return True
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return True
        return False

    def _share(self, request: Request, budget: int, chosen: list[ScheduledRequest]) -> int:
        count = min(request.num_pending_tokens, budget)
        if count:
            chosen.append(ScheduledRequest(request, count))
        return count

    def _admit_next(self) -> bool:
        if not self._waiting or not self._free_rings:
            return False
        request = self._waiting[0]
        shared, start = self._find_prefix(request)
        needed = self.pages.pages_for(request.max_total_tokens) - len(shared)
        if not self._make_free(needed):
            self.pages.give_back(shared)
            return False
        self._waiting.popleft()
        request.ring, request.pages = self._free_rings.pop(), shared + self.pages.take(needed)
        request.num_shared_tokens = len(shared) * self.pages.page_tokens
        request.first_computed_token = request.num_computed_tokens = start
        if self._prefixes is not None:
            self._prefixes.statistics.count(request.num_prompt_tokens, request.num_shared_tokens)
        self._running.append(request)
        return True

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

    def publish(self, request: Request, *, complete: bool = False) -> None:
        """Offer the complete pages of a request to later prompts, after a step that ended well.

        Args:
            request: a running one.
            complete: nothing will be taken back any more; else pages that `truncate` may reach are left out.
        """
        if self._prefixes is not None:
            computed = request.num_computed_tokens
            final = computed if complete else self._least(request)
            count = min(computed, final) // self.pages.page_tokens
            if complete or count > request.num_published_pages:  # most steps complete no page
                self._prefixes.insert(request.token_ids[: count * self.pages.page_tokens], request.pages[:count])
                request.num_published_pages = count

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Take the last tokens of a running request back, as if they had never been computed.

        Window rings, kept halves of pairs and the pages behind `publish` hold what the tokens before them left.

        Args:
            request: a running one.
            num_tokens: tokens that it keeps, computed or known.

        Raises:
            RequestError: more would be taken back than a draft block, or some of the prompt.
        """
        computed, least = request.num_computed_tokens, self._least(request)
        if not least <= num_tokens <= len(request.token_ids):
            raise RequestError(
                f"request {request.request_id}: cannot go back to {num_tokens} tokens; it has {computed} computed ones "
                f"of {len(request.token_ids)}, {request.num_prompt_tokens} of them its prompt, and at most "
                f"{self.decode_rows - 1} can be taken back: {least} to {len(request.token_ids)} tokens can stay"
            )
        del request.token_ids[num_tokens:]
        request.num_computed_tokens = min(computed, num_tokens)

    def _least(self, request: Request) -> int:
        """Tokens that stay whatever is taken back: the prompt, and all but a draft block."""
        return max(request.num_prompt_tokens, request.num_computed_tokens - (self.decode_rows - 1))
