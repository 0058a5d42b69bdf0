"""The Python API."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from minideepinfer.config import EngineConfig
from minideepinfer.errors import ConfigError, MiniDeepInferError, RequestError
from minideepinfer.operators import StageClock
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.coordinator import Coordinator, Worker
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.generation import Generation
from minideepinfer.runtime.outputs import Chunk, RequestOutput
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.world import join

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as given."""

_Item = TypeVar("_Item")


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
        """Runner, scheduler and throughput.

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
            logits: `all` = every position, each run through every layer; `kept` = in bounded replay only the positions
                that run every layer anyway: the last window of the prompt and all behind it.

        Returns:
            For each sequence float32 `[len, vocab]` on the CPU (`kept`: its last rows); with `capture` also, for each
            sequence, the tensors captured by name.

        Raises:
            RequestError: a sequence is empty, too long or has an impossible id (nothing was run), or a pattern matches
                nothing.
        """
        engine = self.engine
        listed = []
        for index, ids in enumerate(_list(sequences, "sequences", "a list of lists of token ids")):
            with _naming(f"sequence {index}"):
                listed.append(_ids(ids))
        prompts = [len(ids) for ids in listed]
        if num_prompt_tokens is not None:
            prompts = _list(num_prompt_tokens, "num_prompt_tokens", "a list of numbers")
        if len(prompts) != len(listed) or not all(isinstance(number, int) for number in prompts):
            raise RequestError(f"num_prompt_tokens is {prompts}; {len(listed)} integers are needed, one per sequence")
        if logits not in ("all", "kept"):
            raise RequestError(f"logits is {logits!r}; `all` or `kept` is needed")
        recorder = None if capture is None else _recorder(capture)
        requests = []
        for index, (ids, prompt) in enumerate(zip(listed, prompts, strict=True)):
            with _naming(f"sequence {index}"):
                requests.append(engine.make_request(ids, len(ids), prompt, logits))
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
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was run.
        """
        engine = self.engine
        listed = _as_prompts(prompts)
        each = _as_params(params, len(listed))
        generations = []
        for index, (prompt, p) in enumerate(zip(listed, each, strict=True)):
            with _naming(f"prompt {index}"):
                generations.append(self._generation(prompt, p))
        try:
            for generation in generations:
                engine.start(generation)
            while any(generation.finish_reason is None for generation in generations):
                engine.step()
        finally:
            for generation in generations:
                engine.abort(generation)
        return [generation.output() for generation in generations]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Continue one prompt, piece by piece. Closing the iterator gives the request up.

        Args:
            prompt: text or ids.
            params: sampling and stopping.

        Yields:
            New ids and the text that is certain by now; the last chunk carries the finish reason.

        Raises:
            RequestError: the prompt cannot be served, or `prompt_logprobs` are asked for, which chunks do not carry.
            MiniDeepInferError: the model was closed meanwhile.
        """
        generation = self._generation(prompt, SamplingParams() if params is None else params)
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
                    self.engine.step()
        finally:
            if self._engine is not None:
                self._engine.abort(generation)

    def _generation(self, prompt: Prompt, params: SamplingParams) -> Generation:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}; SamplingParams are needed")
        ids = self.engine.runner.tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        return self.engine.make_generation(ids, params)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None


def _list(value: Sequence[_Item], name: str, needed: str) -> list[_Item]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is a {type(value).__name__}; {needed} is needed")
    return list(value)


def _ids(prompt: Sequence[int]) -> list[int]:
    return _list(prompt, "a prompt", "text or a list of token ids")


def _recorder(capture: Sequence[str]) -> Capture:
    patterns = _list(capture, "capture", "a list of patterns")
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RequestError(f"capture is {patterns}; a list of patterns is needed")
    return Capture(patterns)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one was given or several; a flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = _list(prompts, "prompts", "text, a list of token ids, or a list of those")
    flat = listed and not any(isinstance(item, Sequence) for item in listed)
    return [listed] if flat else listed


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, number: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    listed = _list(params, "params", "SamplingParams or a list of them")
    if len(listed) != number:
        raise RequestError(f"{len(listed)} sampling parameters were given for {number} prompts; one, or one for each")
    return listed
