"""How to continue a prompt."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from minideepinfer.config.model import describe
from minideepinfer.errors import RequestError

_SEEDS = 2**63
MOST_CONTINUATIONS = 4096
"""Of one prompt; a mistaken number is refused before it fills the memory with handles."""


class SamplingParams(BaseModel):
    """Sampling and stopping of one request. Frozen; what cannot be right is refused with `RequestError`.

    Attributes:
        max_tokens: most tokens to generate.
        min_tokens: tokens before which neither the end token nor anything in `stop` / `stop_token_ids` ends it.
        temperature: 0 = greedy (the lower id among equal logits), else divides the logits.
        top_p: keep the smallest set of most likely tokens whose probability reaches this.
        top_k: keep this many most likely tokens; 0 = all.
        seed: the same seed gives the same draws, whatever else runs; None = another one every time.
        stop: texts that end the generation; the output is cut before them.
        stop_token_ids: ids that end it; the id stays in `token_ids`, its text does not appear.
        logprobs: report each generated token's log-probability and those of so many most likely tokens.
        prompt_logprobs: the same for the prompt, which then runs every row through every layer.
        ignore_eos: do not end at the checkpoint's end token.
        n: continuations of the prompt, 4096 at most; it is computed once for all of them if memory allows. Continuation
            i draws what a request of its own with seed `seed + i` draws; without a seed each draws by itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_tokens: int = Field(64, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=0, lt=_SEEDS)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MOST_CONTINUATIONS)

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        if isinstance(value, str | int):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every text at once")
        return value

    @model_validator(mode="after")
    def _reachable(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.seed is not None and self.seed + self.n > _SEEDS:
            raise ValueError(f"seed {self.seed} leaves no seeds for n = {self.n} continuations; they end at 2^63 - 1")
        return self

    @property
    def seeds(self) -> list[int | None]:
        """Seed of each continuation."""
        return [None if self.seed is None else self.seed + i for i in range(self.n)]

    def seeded(self, seed: int | None) -> SamplingParams:
        """The same for one continuation with a seed of its own.

        Raises:
            RequestError: the seed cannot be.
        """
        return SamplingParams(**self.model_dump() | {"seed": seed, "n": 1})

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise RequestError(f"sampling parameters: {describe(error)}") from None
