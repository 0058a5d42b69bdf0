"""The Python API."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, overload

import torch
from torch import Tensor

from minideepinfer.config import EngineConfig
from minideepinfer.errors import ConfigError, MiniDeepInferError, RequestError
from minideepinfer.operators import StageClock
from minideepinfer.runtime.coordinator import Coordinator, Worker
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.generation import Generation
from minideepinfer.runtime.inputs import (
    Prompt,
    as_generation,
    as_ids,
    as_params,
    as_prompts,
    as_recorder,
    as_seeds,
    as_sequences,
    naming,
)
from minideepinfer.runtime.outputs import Chunk, RequestOutput
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.request import LogitsKind
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.world import join


class LLM:
    """A loaded checkpoint. Use it as a context manager, or call `close`, to free its memory.

    Several ranks (`parallel` in the config, inside `torchrun`) have the same API: what a script does with its `LLM`, it
    does on rank 0. On every other rank the constructor serves rank 0 until that one closes its `LLM`, and then ends the
    process (`SystemExit`, code 0), so that nothing behind it runs twice or waits for anybody.

    The checkpoint's `generation_config.json` is not applied; sampling is what `SamplingParams` says.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        clock: StageClock | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Load a checkpoint.

        Args:
            model: a directory in the released layout, or `tiny` for the packaged trained checkpoint.
            config: how to run it.
            clock: told of the stages of every step, e.g. a `StageTimer`.
            progress: called with blocks read and blocks in all.

        Raises:
            CheckpointError: it is damaged or incomplete.
            OperatorError: an operator that was chosen cannot serve it.
            ConfigError: something about the configuration cannot be.
            RankError: another rank failed, died, did not come, or differs; on any later call as well.
            SystemExit: this is not rank 0, and rank 0 is done.
        """
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; an EngineConfig is needed, see EngineConfig.from_dict"
            )
        self._engine: Engine | None = None
        config = config or EngineConfig()
        world = join(config.parallel)
        with world.together():
            runner = Runner(model, config, clock, progress, world=world)
        if world.rank > 0:
            Worker(runner).serve()
            raise SystemExit(0)
        self._engine = Coordinator(runner) if world.size > 1 else Engine(runner)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """Runner, scheduler and statistics.

        Raises:
            MiniDeepInferError: the model was closed.
        """
        if self._engine is None:
            raise MiniDeepInferError("this LLM was closed; make a new one")
        return self._engine

    def close(self) -> None:
        """Free weights and caches, and let other ranks go; a second call does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @overload
    def forward(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        capture: None = None,
        num_prompt_tokens: Sequence[int] | None = None,
        logits: Literal["all", "kept"] = "all",
    ) -> list[Tensor]: ...

    @overload
    def forward(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        capture: Sequence[str],
        num_prompt_tokens: Sequence[int] | None = None,
        logits: Literal["all", "kept"] = "all",
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]: ...

    def forward(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        capture: Sequence[str] | None = None,
        num_prompt_tokens: Sequence[int] | None = None,
        logits: Literal["all", "kept"] = "all",
    ) -> list[Tensor] | tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Logits of known tokens, in as many steps as `max_tokens_per_step` needs.

        Args:
            sequences: token ids.
            capture: shell patterns over the names of intermediates, e.g. `layers.*.attn.out`; names are those of the
                golden sets.
            num_prompt_tokens: per sequence, tokens that run as a prompt; those behind them run one a step, as in
                decoding. None = all.
            logits: `all` = every position, each run through every layer; `kept` = only the positions that run every
                layer anyway: with `replay: full` all; with `bounded` the last window of the prompt, with `halo` its
                tail, and all behind it.

        Returns:
            For each sequence float32 `[len, vocab]` on the CPU (`kept`: its last rows); with `capture` also, for each
            sequence, the tensors captured by name.

        Raises:
            RequestError: a sequence is empty, too long or has an impossible id (nothing was run), or a pattern matches
                nothing.
        """
        engine = self.engine
        listed = as_sequences(sequences, num_prompt_tokens)
        if logits not in ("all", "kept"):
            raise RequestError(f"logits is {logits!r}; `all` or `kept` is needed")
        recorder = None if capture is None else as_recorder(capture)
        # With full replay a prefix hit would leave rows out, and run others only to rebuild window rings.
        kind: LogitsKind = "all" if engine.runner.engine_config.replay == "full" else logits
        requests = []
        for index, (ids, prompt) in enumerate(listed):
            with naming(f"sequence {index}"):
                requests.append(engine.make_request(ids, len(ids), prompt, kind))
        pieces = engine.score(requests, recorder)
        results = [torch.cat(pieces[request.request_id]) for request in requests]
        if recorder is None:
            return results
        recorder.check()
        return results, [recorder.of(request.request_id) for request in requests]

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue prompts, together.

        Args:
            prompts: one prompt (text, or a flat list of ids) or a list of them.
            params: for all prompts, or one for each.

        Returns:
            One output per prompt, in order; with `n` in its parameters, n of them, one after the other.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was run.
        """
        engine = self.engine
        listed = as_prompts(prompts)
        each = as_params(params, len(listed))
        generations = []
        for index, (prompt, p) in enumerate(zip(listed, each, strict=True)):
            with naming(f"prompt {index}"):
                generations.append(self._generation(prompt, p))
        started: list[tuple[int, Generation]] = []
        try:
            for generation in generations:
                engine.start(generation)
                started.append((0, generation))
                started += enumerate(engine.fork(generation, generation.params.seeds[1:]), 1)
            while any(generation.finish_reason is None for _, generation in started):
                engine.advance()
        finally:
            for _, generation in reversed(started):  # forks before their parent, whose prompt they would compute
                engine.abort(generation)
        return [generation.output(index) for index, generation in started]

    def start(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Queue a prompt; `step` then continues it together with all else that was started.

        Args:
            prompt: text or ids.
            params: sampling and stopping; `n` is 1, see `fork`.

        Returns:
            It has its tokens so far in `token_ids`; when it has ended, `finish_reason` is set and there is `output()`.

        Raises:
            RequestError: the prompt or its parameters cannot be served, or another thread has requests running.
        """
        generation = self._single(prompt, params)
        self.engine.start(generation)
        return generation

    def step(self) -> bool:
        """Run one step of all that was started: chunks of prompts, and one token for each that is behind its prompt.

        Returns:
            Whether something still waits or runs; if nothing did, nothing was run.

        Raises:
            Whatever stopped the step. What ran is given up then; what waited goes on with the next step.
        """
        return self.engine.advance()

    def abort(self, generation: Generation) -> None:
        """Give up what `start` or `fork` returned; what has ended is left alone, and so are forks.

        Any thread may do so; a step that another one is in is waited for.

        Raises:
            RequestError: it was not started on this model.
        """
        self.engine.abort(as_generation(generation))

    def fork(self, generation: Generation, n: int = 1, seeds: Sequence[int | None] | None = None) -> list[Generation]:
        """Let n more generations go on from where one is, which goes on itself.

        They have its tokens, text, log-probabilities and parameters; `max_tokens` counts all tokens behind the prompt.
        With seed s a fork draws each of its tokens with the numbers that a request with seed s has for the token at
        this place. They share the pages that nobody writes any more; window rings and the last page are copied. Of one
        that waits or is in its prompt, they share the prompt when it is computed. A fork for which memory is lacking
        waits, and then computes its tokens again: with the same result, but for what sums in another order and, with
        `replay: bounded`, prefix hits change.

        Args:
            generation: from `start` or `fork`; has not ended.
            n: how many, 4096 at most.
            seeds: one for each; None = each draws by itself.

        Raises:
            RequestError: it has ended or was not started on this model, or a seed cannot be; nothing was forked.
        """
        return self.engine.fork(as_generation(generation), as_seeds(seeds, n))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Continue one prompt, piece by piece. Closing the iterator gives the request up.

        Args:
            prompt: text or ids.
            params: sampling and stopping.

        Yields:
            New ids and the text that is certain by now; the last chunk carries the finish reason.

        Raises:
            RequestError: the prompt cannot be served, or not in chunks (`prompt_logprobs`, `n` above 1).
            MiniDeepInferError: the model was closed meanwhile.
        """
        generation = self._single(prompt, params)
        if generation.params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs come with generate; the chunks of a stream do not carry them")
        return self._chunks(generation)

    def _chunks(self, generation: Generation) -> Generator[Chunk, None, None]:
        self.engine.start(generation)
        try:
            while generation.chunks or generation.finish_reason is None:
                if generation.chunks:
                    yield generation.chunks.popleft()
                else:
                    self.engine.advance()
        finally:
            if self._engine is not None:
                self._engine.abort(generation)

    def _single(self, prompt: Prompt, params: SamplingParams | None) -> Generation:
        generation = self._generation(prompt, SamplingParams() if params is None else params)
        if (n := generation.params.n) != 1:
            raise RequestError(f"n is {n}, which is for generate; here, start one and fork it {n - 1} times")
        return generation

    def _generation(self, prompt: Prompt, params: SamplingParams) -> Generation:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}; SamplingParams are needed")
        ids = self.engine.runner.tokenizer.encode(prompt) if isinstance(prompt, str) else as_ids(prompt)
        return self.engine.make_generation(ids, params)
