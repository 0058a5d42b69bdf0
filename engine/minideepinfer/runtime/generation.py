"""The output side of a request: sampled tokens, text, stopping."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable

from torch import Tensor

from minideepinfer.errors import RequestError
from minideepinfer.runtime.outputs import Chunk, FinishReason, Logprobs, RequestOutput
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.sampler import Sampler, log_probabilities
from minideepinfer.runtime.tokenizer import Tokenizer


class Generation:
    """Continues one request token by token.

    Attributes:
        request: its place in the scheduler.
        params: its sampling and stopping.
        chunks: what was produced and not yet taken by a stream; of a fork, what came since.
        prompt_logprobs: as in `RequestOutput`, as far as they are known.
        finish_reason: None while it waits or runs.
    """

    def __init__(self, request: Request, params: SamplingParams, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.request = request
        self.params = params
        self.chunks: deque[Chunk] = deque()
        self.finish_reason: FinishReason | None = None
        self._sampler = Sampler(params)
        self._enders = set(params.stop_token_ids) | (set() if params.ignore_eos else {eos_token_id})
        self._text = StopText(params.stop)
        self._detokenizer = tokenizer.stream()
        self._logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs | None] = [None]

    @property
    def token_ids(self) -> list[int]:
        """Generated so far."""
        return self.request.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        """How many were generated so far."""
        return len(self.request.token_ids) - self.request.num_prompt_tokens

    def fork(self, request: Request, seed: int | None) -> Generation:
        """Another generation from all that this one has produced, with other draws from here on.

        Args:
            request: has the same tokens.
            seed: it draws what a generation with this seed draws for tokens at the same place; None = by itself.

        Raises:
            RequestError: the seed cannot be.
        """
        other = copy.copy(self)
        other.request, other.params = request, self.params.seeded(seed)
        other.chunks = deque()
        other._sampler = Sampler(other.params, num_drawn=self.num_tokens)
        other._text, other._detokenizer = copy.copy(self._text), self._detokenizer.copy()
        other._logprobs, other.prompt_logprobs = list(self._logprobs), list(self.prompt_logprobs)
        return other

    def accept(self, positions: range, logits: Tensor) -> None:
        """Take a step's logits: score prompt tokens, and sample where the last known token was computed.

        Args:
            positions: of the rows.
            logits: float32 `[len(positions), vocab]`.
        """
        for position, row in zip(positions, logits, strict=True):
            if position + 1 == len(self.request.token_ids):
                self._extend(row)
            elif position + 1 < self.request.num_prompt_tokens:
                self._score(position + 1, row)

    def output(self, index: int = 0) -> RequestOutput:
        """The whole of what was generated.

        Args:
            index: which of the continuations of its prompt this is.

        Raises:
            RequestError: it has not ended.
        """
        if self.finish_reason is None:
            raise RequestError(f"request {self.request.request_id}: has not ended yet; step until finish_reason is set")
        return RequestOutput(
            token_ids=self.token_ids,
            text=self._text.shown,
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else self._logprobs,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_generated_tokens=self.num_tokens,
            index=index,
        )

    def follow(self, chunk: Chunk) -> None:
        """Take over what the same generation has produced on another rank."""
        self.request.token_ids += chunk.token_ids
        self._text.shown += chunk.text
        self._logprobs += chunk.logprobs or []
        self.finish_reason = chunk.finish_reason
        self.chunks.append(chunk)

    def abort(self) -> None:
        """End without a further token."""
        self._emit([], self._complete_text(self._detokenizer.finish()), "abort")

    def _score(self, position: int, logits: Tensor) -> None:
        known = position < len(self.prompt_logprobs)  # from before it started over
        if self.params.prompt_logprobs is not None and not known:
            token_id = self.request.token_ids[position]
            self.prompt_logprobs.append(log_probabilities(logits, token_id, self.params.prompt_logprobs))

    def _extend(self, logits: Tensor) -> None:
        early = self.num_tokens < self.params.min_tokens
        token_id = self._sampler.sample(logits, tuple(self._enders) if early else ())
        if self.params.logprobs is not None:
            self._logprobs.append(log_probabilities(logits, token_id, self.params.logprobs))
        self.request.token_ids.append(token_id)
        if token_id in self._enders:
            self._emit([token_id], self._complete_text(self._detokenizer.finish()), "stop")
            return
        text, last = self._detokenizer.push(token_id), self.num_tokens == self.params.max_tokens
        if last:
            text += self._detokenizer.finish()
        shown, stopped = self._text.push(text, may_stop=self.num_tokens >= self.params.min_tokens)
        if stopped:
            self._emit([token_id], shown, "stop")
        elif last:
            self._emit([token_id], shown + self._text.flush(), "length")
        else:
            self._emit([token_id], shown, None)

    def _complete_text(self, rest: str) -> str:
        shown, _ = self._text.push(rest, may_stop=False)
        return shown + self._text.flush()

    def _emit(self, token_ids: list[int], text: str, reason: FinishReason | None) -> None:
        self.finish_reason = reason
        logprobs = None if self.params.logprobs is None else self._logprobs[-1:] if token_ids else []
        self.chunks.append(Chunk(token_ids, text, reason, logprobs))


class StopText:
    """Text that ends before the first stop string; nothing that may be cut later is shown before.

    Attributes:
        shown: everything released so far.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.shown = ""

    def push(self, text: str, *, may_stop: bool) -> tuple[str, bool]:
        """Add text.

        Args:
            text: what came.
            may_stop: whether a stop string counts already; one that was completed before never does.

        Returns:
            What can be shown now, and whether a stop string was found (then nothing follows).
        """
        pending, old = self._held + text, len(self._held)
        found = [pending.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops] if may_stop else []
        if any(at >= 0 for at in found):
            return self._show(pending, min(at for at in found if at >= 0)), True
        keep = max((_overlap(pending, stop) for stop in self._stops), default=0)
        return self._show(pending, len(pending) - keep), False

    def flush(self) -> str:
        """Release what is held back; no more text comes."""
        return self._show(self._held, len(self._held))

    def _show(self, pending: str, end: int) -> str:
        self._held = pending[end:]
        self.shown += pending[:end]
        return pending[:end]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is shorter than it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
