"""What the next step computes: first come, first served, within a token budget, a page budget and the window rings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from minideepinfer.cache.pages import PageAllocator
from minideepinfer.cache.prefix_tree import PrefixTree
from minideepinfer.errors import RequestError
from minideepinfer.operators.declaration import Phase
from minideepinfer.runtime.memory import Copies, NoCopies, RequestMemory
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
    never lacks memory, and a later arrival never overtakes an earlier one. A fork comes with its parent: memory that is
    free goes to it before those that wait.

    Attributes:
        pages: the page budget.
        memory: what requests hold.
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
        copies: Copies | None = None,
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
            copies: the memory behind rings and pages; None = there is none.
        """
        self.pages = pages
        self.memory = RequestMemory(pages, num_rings, prefixes, replay_start, copies or NoCopies())
        self.max_tokens_per_step = max_tokens_per_step
        self.max_positions = max_positions
        self.decode_rows = decode_rows
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._pending_forks: list[Request] = []
        self._places = (self._running, self._waiting, self._pending_forks)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold nothing yet, in order of arrival."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold pages and a ring, in order of arrival."""
        return tuple(self._running)

    @property
    def pending_forks(self) -> tuple[Request, ...]:
        """Forks of requests that wait or are in their prompt; they may hold a ring and pages of their own already."""
        return tuple(self._pending_forks)

    @property
    def num_free_rings(self) -> int:
        """Window rings that nobody holds."""
        return self.memory.num_free_rings

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
        if any(request.request_id == other.request_id for place in self._places for other in place):
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

    def fork(self, parent: Request, child: Request) -> None:
        """Let a request go on from the tokens of another one, with what is computed of them.

        Behind the parent's prompt this happens at once, and the child runs. Pages that neither will write again they
        hold together; the ring, the kept halves of pairs and pages that either may still write are copied. Before, it
        keeps a ring and pages ready, if there are any, until `branch` is told that the prompt is computed. A child for
        which memory is lacking starts over as an ordinary request whose tokens are known.

        Args:
            parent: waits, runs, or is itself a child that waits for a prompt.
            child: `parent.twin(...)`.

        Raises:
            RequestError: the child's id is in use; nothing was done.
        """
        self.check(child)
        parent = parent.parent or parent
        assert parent in self._running or parent in self._waiting, "only what waits or runs can be forked"
        if parent.ring is not None and not parent.in_prompt:
            self._part(parent, child)
            return
        child.parent = parent
        self._pending_forks.append(child)
        if parent.ring is not None:
            self.memory.reserve(child, self._final_pages(parent))

    def branch(self, parent: Request) -> list[Request]:
        """Let the forks of a running request go that waited for its prompt, if that is computed by now.

        To be called behind each step, with each request that took part.

        Returns:
            Them; from now on they run, or wait on their own.
        """
        children = [] if parent.in_prompt else self._take_forks(parent)
        for child in children:
            self._part(parent, child)
        return children

    def abort(self, request_id: int) -> bool:
        """Drop a request, wherever it is; forks that wait for its prompt start over.

        Returns:
            Whether it was there.
        """
        for place in self._places:
            for request in place:
                if request.request_id == request_id:
                    place.remove(request)
                    self._leave(request)
                    return True
        return False

    def _leave(self, request: Request) -> None:
        self.memory.release(request)
        for child in self._take_forks(request):
            self._start_over(child)

    def _take_forks(self, parent: Request) -> list[Request]:
        children = [child for child in self._pending_forks if child.parent is parent]
        for child in children:
            self._pending_forks.remove(child)
            child.parent = None
        return children

    def _part(self, parent: Request, child: Request) -> None:
        num_shared = self._final_pages(parent)
        if child.ring is None and not self.memory.reserve(child, num_shared):
            self._start_over(child)
        else:
            self.memory.inherit(child, parent, num_shared)
            self._running.append(child)

    def _start_over(self, child: Request) -> None:
        self.memory.release(child)
        self.memory.forks.started_over += 1
        self._waiting.append(child)

    def _share(self, request: Request, budget: int, chosen: list[ScheduledRequest]) -> int:
        count = min(request.num_pending_tokens, budget)
        if count:
            chosen.append(ScheduledRequest(request, count))
        return count

    def _admit_next(self) -> bool:
        if not self._waiting or not self.memory.admit(self._waiting[0]):
            return False
        request = self._waiting.popleft()
        self._running.append(request)
        for child in self._pending_forks:
            if child.parent is request:
                self.memory.reserve(child, self._final_pages(request))
        return True

    def publish(self, request: Request, *, complete: bool = False) -> None:
        """Offer the complete pages of a request to later prompts, after a step that ended well.

        Args:
            request: a running one.
            complete: nothing will be taken back any more; else pages that `truncate` may reach are left out.
        """
        computed = request.num_computed_tokens
        self.memory.publish(request, computed if complete else min(computed, self._least(request)))

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Take the last tokens of a running request back, as if they had never been computed.

        Window rings, kept halves of pairs and the pages behind `publish` hold what the tokens before them left. However
        often this is done, no token comes back that was out of reach before.

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
        request.num_final_tokens = least

    def _least(self, request: Request) -> int:
        """Tokens that stay whatever is taken back: the prompt, and all but a draft block."""
        reach = self.decode_rows - 1
        return max(request.num_prompt_tokens, request.num_computed_tokens - reach, request.num_final_tokens)

    def _final_pages(self, request: Request) -> int:
        """First pages that are not written again once the prompt is computed."""
        return self._least(request) // self.pages.page_tokens
