"""What a finished request, or a piece of a running one, looks like to the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["length", "stop", "abort"]
"""`max_tokens` reached; an end token, stop id or stop string; given up."""

Logprobs = dict[int, float]
"""Log-probability by token id: the token itself first, then the most likely ones."""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        token_ids: generated ids, the ending one included.
        text: their text, cut before a stop string; "" if the checkpoint has no tokenizer.
        finish_reason: why it ended.
        logprobs: one entry per generated token, None if not asked for.
        prompt_logprobs: one entry per prompt token, the first one None; None if not asked for.
        num_prompt_tokens: length of the prompt.
        num_generated_tokens: length of `token_ids`.
        index: which of the `n` continuations of its prompt.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[Logprobs] | None
    prompt_logprobs: list[Logprobs | None] | None
    num_prompt_tokens: int
    num_generated_tokens: int
    index: int = 0


@dataclass(frozen=True)
class Chunk:
    """What one step of a stream adds.

    Attributes:
        token_ids: new ids.
        text: new text; may lag behind the ids, is never taken back.
        finish_reason: set on the last chunk.
        logprobs: one entry per new id, None if not asked for.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[Logprobs] | None = None
