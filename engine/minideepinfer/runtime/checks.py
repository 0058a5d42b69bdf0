"""What a request may ask of a checkpoint."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

from minideepinfer.config import ModelConfig
from minideepinfer.errors import RequestError
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.tokenizer import Tokenizer


def checked_ids(token_ids: Sequence[SupportsIndex], config: ModelConfig) -> list[int]:
    """Token ids as plain numbers.

    Raises:
        RequestError: one is not a text token of the model.
    """
    return [_checked_id(position, given, config) for position, given in enumerate(token_ids)]


def _checked_id(position: int, given: SupportsIndex, config: ModelConfig) -> int:
    vocab, image = config.text_config.vocab_size, config.image_token_id
    try:
        token_id = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        token_id = -1
    if not 0 <= token_id < vocab:
        raise RequestError(f"token {position} of the prompt is {given!r}; ids are integers 0..{vocab - 1}")
    if token_id == image:
        raise RequestError(f"token {position} of the prompt is the image token {image}; only text is run")
    return token_id


def check_params(params: SamplingParams, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Refuse sampling that a checkpoint does not allow.

    Raises:
        RequestError: stop strings without a tokenizer, stop ids that no token has, or every token ends a generation
            that must not end.
    """
    if params.stop and tokenizer.backend is None:
        raise RequestError("stop strings need a tokenizer, but the checkpoint has none; use stop_token_ids")
    vocab = config.text_config.vocab_size
    if out := [i for i in params.stop_token_ids if not 0 <= i < vocab]:
        raise RequestError(f"stop_token_ids {out} are outside the vocabulary of {vocab}")
    enders = {*params.stop_token_ids, *([] if params.ignore_eos else [config.eos_token_id])}
    if params.min_tokens and len(enders) == vocab:
        raise RequestError(f"min_tokens is {params.min_tokens}, but every token ends the generation")
