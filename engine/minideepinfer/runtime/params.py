"""How to continue a prompt."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from minideepinfer.config.model import describe
from minideepinfer.errors import RequestError


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
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_tokens: int = Field(64, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0)
    ignore_eos: bool = False

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
        return self

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise RequestError(f"sampling parameters: {describe(error)}") from None
