"""Several ranks behind the engine of one: rank 0 hands requests out and gathers outputs, the others serve."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from minideepinfer.errors import RankError
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.generation import Generation
from minideepinfer.runtime.outputs import Chunk, Logprobs
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.runner import RequestLogits, Runner


@dataclass(frozen=True)
class Start:
    """Queue a request. Without sampling its logits are wanted."""

    request: Request
    params: SamplingParams | None


@dataclass(frozen=True)
class Fork:
    """Let a generation go on from another one."""

    parent_id: int
    child_id: int
    seed: int | None


@dataclass(frozen=True)
class Drop:
    """Forget a request, which was given up."""

    request_id: int


Order = Start | Fork | Drop
"""What rank 0 wants of another rank before a step."""


@dataclass(frozen=True)
class News:
    """What a step did to a request on another rank.

    Attributes:
        request_id: which.
        num_computed_tokens: how far it is.
        chunks: what its generation produced.
        prompt_logprobs: of a generation that has ended, behind the first position.
        positions: whose logits were computed, and `logits` `[len(positions), vocab]` on the CPU, if they are wanted.
    """

    request_id: int
    num_computed_tokens: int
    chunks: tuple[Chunk, ...] = ()
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    positions: range = range(0)
    logits: Tensor | None = None


class Coordinator(Engine):
    """The engine of rank 0, which speaks for all ranks.

    A request goes to the rank with the fewest tokens left to compute and stays there. `step` is one step of every rank.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._world = runner.world
        self._orders = self._no_orders()
        self._away: dict[int, tuple[int, Request]] = {}
        self._at_home = False
        atexit.register(self.close)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, on any rank."""
        return super().busy or bool(self._away)

    def score(self, requests: Sequence[Request], recorder: Capture | None = None) -> dict[int, list[Tensor]]:
        """See `Engine.score`. Requests whose intermediates are recorded all run on rank 0."""
        self._at_home = recorder is not None
        try:
            return super().score(requests, recorder)
        finally:
            self._at_home = False

    def step(self, recorder: Capture | None = None) -> list[RequestLogits]:
        """See `Engine.step`; after an error no rank goes on."""
        try:
            with self._lock, self._world.together():
                orders, self._orders = self._orders, self._no_orders()
                self._world.broadcast(orders)
                results = super().step(recorder)
                nothing: list[News] = []
                for news in self._world.gather(nothing):
                    results += [scored for item in news if (scored := self._follow(item))]
                return results
        except BaseException:
            self._abandon()
            raise

    def close(self) -> None:
        """Let the other ranks go."""
        atexit.unregister(self.close)
        with suppress(RankError), self._world.together():
            self._world.broadcast(None)
        self._world.close()

    def _no_orders(self) -> list[list[Order]]:
        return [[] for _ in range(self._world.size)]

    def _add(self, request: Request, params: SamplingParams | None) -> None:
        rank = 0 if self._at_home else min(range(self._world.size), key=self._tokens_left)
        if rank == 0:
            self.scheduler.add(request)
        else:
            self._away[request.request_id] = rank, request
            self._orders[rank].append(Start(request, params))

    def _fork(self, parent: Generation, child: Generation) -> None:
        parent_id, child_id = parent.request.request_id, child.request.request_id
        if parent_id in self._away:
            rank, _ = self._away[parent_id]
            self._away[child_id] = rank, child.request
            self._orders[rank].append(Fork(parent_id, child_id, child.params.seed))
        else:
            super()._fork(parent, child)

    def _drop(self, request_id: int) -> None:
        if request_id in self._away:
            rank, _ = self._away.pop(request_id)
            self._orders[rank].append(Drop(request_id))
        else:
            self.scheduler.abort(request_id)

    def _tokens_left(self, rank: int) -> int:
        own = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.pending_forks]
        theirs = [request for place, request in self._away.values() if place == rank]
        return sum(request.max_total_tokens - request.num_computed_tokens for request in (theirs if rank else own))

    def _follow(self, news: News) -> RequestLogits | None:
        """Bring a request up to date; returns its logits, if it is one whose logits are wanted."""
        _, request = self._away[news.request_id]
        request.num_computed_tokens = news.num_computed_tokens
        generation = self._generations.get(news.request_id)
        if generation is not None:
            for chunk in news.chunks:
                generation.follow(chunk)
            generation.prompt_logprobs += news.prompt_logprobs
        if request.all_computed if generation is None else generation.finish_reason is not None:
            del self._away[news.request_id]
            self._generations.pop(news.request_id, None)
        if self.on_step is not None:
            self.on_step(request)
        return None if news.logits is None else RequestLogits(request, news.positions, news.logits)

    def _abandon(self) -> None:
        super()._abandon()
        for request_id in list(self._away):
            del self._away[request_id]
            if generation := self._generations.pop(request_id, None):
                generation.abort()


class Worker(Engine):
    """The engine of another rank, which does what rank 0 wants."""

    def serve(self) -> None:
        """Take part in every step until rank 0 closes the model.

        Raises:
            RankError: another rank failed, died or did not come.
            Whatever stopped a step here.
        """
        world = self.runner.world
        with world.together():
            orders: list[list[Order]] | None = []
            while (orders := world.broadcast(orders)) is not None:
                for order in orders[world.rank]:
                    self._obey(order)
                world.gather([self._news(*item) for item in self._step(None)])
        world.close()

    def _obey(self, order: Order) -> None:
        match order:
            case Start(request, params) if params is not None:
                self.start(self._generation(request, params))
            case Start(request, _):
                self._add(request, None)
            case Fork(parent_id, child_id, seed):
                parent = self._generations[parent_id]
                child = parent.fork(parent.request.twin(child_id), seed)
                self._fork(parent, child)
                self._generations[child_id] = child
            case Drop(request_id):
                self._generations.pop(request_id, None)
                self._drop(request_id)

    def _news(self, result: RequestLogits, generation: Generation | None) -> News:
        request = result.request
        if generation is None:
            logits = result.logits.to("cpu", copy=True)  # a copy, or all that it is a view of would travel
            return News(request.request_id, request.num_computed_tokens, positions=result.positions, logits=logits)
        chunks = tuple(generation.chunks)
        generation.chunks.clear()
        prompt_logprobs = generation.prompt_logprobs[1:] if generation.finish_reason else []
        return News(request.request_id, request.num_computed_tokens, chunks, prompt_logprobs)
