"""One sequence of tokens on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LogitsKind = Literal["last", "kept", "all"]
"""Rows whose logits are wanted: the last of the known tokens, the rows that run every layer anyway, or all."""


@dataclass(eq=False)
class Request:
    """Token ids, how far they are computed, and what the request holds meanwhile.

    Attributes:
        request_id: unique among the requests that wait or run.
        token_ids: the prompt, then what was generated or is teacher-forced.
        num_prompt_tokens: tokens that run in chunks; those behind them run one a step.
        max_total_tokens: most tokens that will ever be computed; pages for them are reserved at admission.
        logits: see `LogitsKind`; with `all` every row runs every layer, also in bounded replay.
        num_computed_tokens: tokens whose cache entries exist; the runner advances it.
        ring: window ring held while running.
        pages: pages held while running, in order of position.
        num_shared_tokens: first tokens whose global entries were there at admission, or when it was forked from another
            one; they are never written.
        first_computed_token: first row that was run, below `num_shared_tokens` only to rebuild window rings; no window
            entry before it exists.
        num_published_pages: first pages that were offered to later prompts.
        num_final_tokens: tokens that stayed out of reach of the latest `Scheduler.truncate`, and do ever after.
        parent: whose prompt is computed on this request's behalf as well; None = its own is, or it is computed.
    """

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    logits: LogitsKind = "last"
    num_computed_tokens: int = 0
    ring: int | None = None
    pages: list[int] = field(default_factory=list)
    num_shared_tokens: int = 0
    first_computed_token: int = 0
    num_published_pages: int = 0
    num_final_tokens: int = 0
    parent: Request | None = None

    def twin(self, request_id: int) -> Request:
        """Another request for the same tokens, of which nothing is computed yet."""
        return Request(request_id, list(self.token_ids), self.num_prompt_tokens, self.max_total_tokens, self.logits)

    @property
    def in_prompt(self) -> bool:
        """Part of the prompt is still to be computed."""
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def all_computed(self) -> bool:
        """Nothing is known that was not computed."""
        return self.num_computed_tokens == len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that the next step may compute: the rest of the prompt, or one token behind it if it is known."""
        if self.in_prompt:
            return self.num_prompt_tokens - self.num_computed_tokens
        return min(1, len(self.token_ids) - self.num_computed_tokens)
