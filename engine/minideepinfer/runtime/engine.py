"""The step loop: requests come and go, each step schedules, executes and samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

import torch

from minideepinfer.cache.pages import PageAllocator
from minideepinfer.cache.prefix_tree import PrefixTree
from minideepinfer.errors import RequestError
from minideepinfer.operators import Stage
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.checks import check_params, checked_ids
from minideepinfer.runtime.generation import Generation
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.replay import replay_start
from minideepinfer.runtime.request import LogitsKind, Request
from minideepinfer.runtime.runner import RequestLogits, Runner
from minideepinfer.runtime.scheduler import Scheduler
from minideepinfer.runtime.statistics import CacheStatistics, Throughput, WorkCount


class Engine:
    """Runs requests on a runner.

    Attributes:
        runner: the loaded model.
        scheduler: who runs when.
        throughput: totals since the start.
        work: likewise, rows x layers.
        prefixes: global entries of earlier prompts; None = not kept.
        on_step: called with each request that a step has advanced, for progress bars.
    """

    def __init__(self, runner: Runner) -> None:
        config, text = runner.engine_config, runner.config.text_config
        self.runner = runner
        pages = PageAllocator(config.cache.num_pages, config.cache.page_tokens)
        self.prefixes = PrefixTree(pages) if config.cache.prefix else None
        self.scheduler = Scheduler(
            pages=pages,
            num_rings=config.cache.max_requests,
            max_tokens_per_step=config.max_tokens_per_step,
            max_positions=text.max_position_embeddings,
            decode_rows=1 + text.dspark_block_size,
            prefixes=self.prefixes,
            replay_start=partial(replay_start, text, config.replay),
            copies=runner.cache,
        )
        self.throughput, self.work = Throughput(), WorkCount()
        self.on_step: Callable[[Request], None] | None = None
        self._generations: dict[int, Generation] = {}
        self._ids = count()
        self._lock = threading.RLock()  # held by a step, so that nothing is started or given up in its middle
        self._thread = threading.get_ident()

    @property
    def cache_statistics(self) -> CacheStatistics:
        """What the caches take and what they saved so far, on this rank."""
        cache, scheduler = self.runner.cache, self.scheduler
        return CacheStatistics(
            cache.layout.name,
            cache.num_bytes,
            cache.page_bytes / scheduler.pages.page_tokens,
            cache.ring_bytes,
            None if self.prefixes is None else self.prefixes.statistics,
            scheduler.memory.forks,
        )

    def make_request(self, token_ids: Sequence[int], total: int, prompt: int, logits: LogitsKind) -> Request:
        """A request that passed every check and is not queued yet.

        Args:
            token_ids: known tokens.
            total: most tokens that will be computed.
            prompt: how many of the known tokens are the prompt.
            logits: rows whose logits are wanted.

        Raises:
            RequestError: an id is not one of the model's text tokens, or the request can never run.
        """
        known = checked_ids(token_ids, self.runner.config)
        request = Request(next(self._ids), known, prompt, total, logits)
        self.scheduler.check(request)
        return request

    def make_generation(self, token_ids: Sequence[int], params: SamplingParams) -> Generation:
        """A checked request together with its sampling; see `make_request`."""
        known = len(token_ids)
        logits: LogitsKind = "last" if params.prompt_logprobs is None else "all"
        request = self.make_request(token_ids, known + params.max_tokens - 1, known, logits)
        check_params(params, self.runner.config, self.runner.tokenizer)
        return self._generation(request, params)

    def _generation(self, request: Request, params: SamplingParams) -> Generation:
        return Generation(request, params, self.runner.tokenizer, self.runner.config.eos_token_id)

    @contextmanager
    def _by_one_thread(self) -> Iterator[None]:
        """Refuses while another thread has work here: its steps would take this one's tokens."""
        with self._lock:
            if self.busy and self._thread != threading.get_ident():
                raise RequestError(
                    "another thread has requests running on this model; one thread at a time may use it, so finish "
                    "those first, hand all prompts to one generate call, or put a lock around the calls"
                )
            self._thread = threading.get_ident()
            yield

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def _add(self, request: Request, params: SamplingParams | None) -> None:
        self.scheduler.add(request)

    def _fork(self, parent: Generation, child: Generation) -> None:
        self.scheduler.fork(parent.request, child.request)

    def _drop(self, request_id: int) -> None:
        self.scheduler.abort(request_id)

    def start(self, generation: Generation) -> None:
        """Queue a generation.

        Raises:
            RequestError: another thread has requests running.
        """
        with self._by_one_thread():
            self._add(generation.request, generation.params)
        self._generations[generation.request.request_id] = generation

    def fork(self, generation: Generation, seeds: Sequence[int | None]) -> list[Generation]:
        """Let further generations go on from what one has produced; see `Scheduler.fork` for what they share.

        They have the tokens, text and log-probabilities that it has now, and its limits: `max_tokens` counts what they
        were given. While it waits or is in its prompt, they wait for the prompt to be computed; when it is given up
        before, they compute it themselves.

        Args:
            generation: waits or runs here.
            seeds: one for each; None = it draws by itself.

        Raises:
            RequestError: it has ended or was not started here, a seed cannot be, or another thread has requests
                running; nothing was forked.
        """
        self._check_runs(generation, "forked")
        with self._by_one_thread():
            children = [generation.fork(generation.request.twin(next(self._ids)), seed) for seed in seeds]
            for child in children:
                self._fork(generation, child)
                self._generations[child.request.request_id] = child
        return children

    def _check_runs(self, generation: Generation, what: str) -> None:
        request = generation.request
        if generation.finish_reason is not None:
            raise RequestError(
                f"request {request.request_id}: has ended ({generation.finish_reason}) and cannot be {what}; start "
                "another one with its tokens as the prompt"
            )
        if self._generations.get(request.request_id) is not generation:
            raise RequestError(f"request {request.request_id}: was not started on this model and cannot be {what}")

    def abort(self, generation: Generation) -> None:
        """Give a generation up; a finished one is left alone. Its forks go on. Other threads may do so between steps.

        Raises:
            RequestError: it was not started here.
        """
        with self._lock:
            if generation.finish_reason is None:
                self._check_runs(generation, "given up")
                del self._generations[generation.request.request_id]
                self._drop(generation.request.request_id)
                generation.abort()

    def step(self, recorder: Capture | None = None) -> list[RequestLogits]:
        """Run one step and give every generation its logits.

        Returns:
            The logits of requests that are not generations (see `score`).

        Raises:
            Whatever stopped the step. All that was running is then given up, since its caches may be half written.
        """
        with self._lock:
            try:
                return [result for result, generation in self._step(recorder) if generation is None]
            except BaseException:
                self._abandon()
                raise

    def advance(self) -> bool:
        """Run one step, if anything waits or runs.

        Returns:
            Whether something still does.
        """
        with self._lock:
            if self.busy:
                self.step()
            return self.busy

    def close(self) -> None:
        """Nothing is held that others wait for."""

    def _step(self, recorder: Capture | None) -> list[tuple[RequestLogits, Generation | None]]:
        """Run one step; the logits of each request that took part, and the generation that was given them."""
        begin, clock = time.perf_counter(), self.runner.clock
        with clock.stage(Stage.OTHER):
            scheduled = self.scheduler.schedule()
            results = self.runner.execute(scheduled, recorder)
            shares = self.runner.shares
            assert any(share.num_tokens for share in shares), "somebody waits, yet nothing can run"
            for item in scheduled:
                self.scheduler.publish(item.request)
            with clock.stage("sampling"):
                delivered = [pair for result in results for pair in self._deliver(result)]
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
        if self.on_step is not None:
            for item in scheduled:
                self.on_step(item.request)
        phase, tokens = max(share.phase for share in shares), sum(s.num_tokens for s in shares)  # "decode" < "prefill"
        self.throughput.add(phase, tokens, time.perf_counter() - begin)
        self.work.add(shares, self.runner.config.text_config)
        return delivered

    def score(self, requests: Sequence[Request], recorder: Capture | None = None) -> dict[int, list[torch.Tensor]]:
        """Run requests whose tokens are all known.

        Returns:
            Their logits on the CPU by request id, in pieces.
        """
        pieces: dict[int, list[torch.Tensor]] = {request.request_id: [] for request in requests}
        unfinished: set[int] = set()
        try:
            for request in requests:
                with self._by_one_thread():
                    self._add(request, None)
                unfinished.add(request.request_id)
            while unfinished:
                for result in self.step(recorder):
                    pieces[result.request.request_id].append(result.logits.cpu())
                    if result.request.all_computed:
                        unfinished.remove(result.request.request_id)
        finally:
            for request_id in unfinished:
                self._drop(request_id)
        return pieces

    def _abandon(self) -> None:
        """Give up what ran, and the forks that were to come of it."""
        forks = [child for child in self.scheduler.pending_forks if child.parent in self.scheduler.running]
        for request in (*forks, *self.scheduler.running):
            self.scheduler.abort(request.request_id)
            generation = self._generations.pop(request.request_id, None)
            if generation is not None and generation.finish_reason is None:  # else its last chunk was given out
                generation.abort()

    def _deliver(self, result: RequestLogits) -> list[tuple[RequestLogits, Generation | None]]:
        """Give a generation its logits, and the last of them to forks that waited for the end of its prompt."""
        request = result.request
        generation = self._generations.get(request.request_id)
        delivered = [(result, generation)]
        if generation is None:
            if request.all_computed:
                self._leave(request)
            return delivered
        generation.accept(result.positions, result.logits)
        for child in self.scheduler.branch(request):
            twin = self._generations[child.request_id]
            twin.prompt_logprobs = list(generation.prompt_logprobs)
            twin.accept(result.positions[-1:], result.logits[-1:])
            delivered.append((RequestLogits(child, result.positions[-1:], result.logits[-1:]), twin))
        for given, owner in delivered:
            if owner is not None and owner.finish_reason is not None:
                self._leave(given.request)
        return delivered

    def _leave(self, request: Request) -> None:
        self._generations.pop(request.request_id, None)
        if request.ring is not None:
            self.scheduler.publish(request, complete=True)
        self.scheduler.abort(request.request_id)
