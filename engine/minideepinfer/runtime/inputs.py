"""What callers hand to `LLM`, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from minideepinfer.errors import RequestError
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.generation import Generation
from minideepinfer.runtime.params import MOST_CONTINUATIONS, SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as given."""

_Item = TypeVar("_Item")


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put a name in front of what is refused."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None


def as_list(value: Sequence[_Item], name: str, needed: str) -> list[_Item]:
    """A list of what is a sequence, but no text."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is a {type(value).__name__}; {needed} is needed")
    return list(value)


def as_ids(prompt: Sequence[int]) -> list[int]:
    """A list of token ids; the ids are checked where the model is known."""
    return as_list(prompt, "a prompt", "text or a list of token ids")


def as_sequences(
    sequences: Sequence[Sequence[int]], num_prompt_tokens: Sequence[int] | None
) -> list[tuple[list[int], int]]:
    """Token ids of each sequence, and how many of them are its prompt."""
    listed = []
    for index, ids in enumerate(as_list(sequences, "sequences", "a list of lists of token ids")):
        with naming(f"sequence {index}"):
            listed.append(as_ids(ids))
    prompts = [len(ids) for ids in listed]
    if num_prompt_tokens is not None:
        prompts = as_list(num_prompt_tokens, "num_prompt_tokens", "a list of numbers")
    if len(prompts) != len(listed) or not all(type(number) is int for number in prompts):
        raise RequestError(f"num_prompt_tokens is {prompts}; {len(listed)} integers are needed, one per sequence")
    return list(zip(listed, prompts, strict=True))


def as_recorder(capture: Sequence[str]) -> Capture:
    """What collects intermediates by patterns."""
    patterns = as_list(capture, "capture", "a list of patterns")
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RequestError(f"capture is {patterns}; a list of patterns is needed")
    return Capture(patterns)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one was given or several; a flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = as_list(prompts, "prompts", "text, a list of token ids, or a list of those")
    flat = listed and not any(isinstance(item, Sequence) for item in listed)
    return [listed] if flat else listed


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, number: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    listed = as_list(params, "params", "SamplingParams or a list of them")
    if len(listed) != number:
        raise RequestError(f"{len(listed)} sampling parameters were given for {number} prompts; one, or one for each")
    return listed


def as_generation(value: Any) -> Generation:
    """What `LLM.start` and `LLM.fork` return."""
    if not isinstance(value, Generation):
        raise RequestError(f"generation is a {type(value).__name__}; what LLM.start or LLM.fork returned is needed")
    return value


def as_seeds(seeds: Sequence[int | None] | None, number: int) -> list[int | None]:
    """Seeds of so many forks; what a seed may be is checked by `SamplingParams`."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_CONTINUATIONS:
        raise RequestError(f"n is {number!r}; a number of forks from 1 to {MOST_CONTINUATIONS} is needed")
    listed: list[int | None] = [None] * number
    if seeds is not None:
        listed = as_list(seeds, "seeds", "a list of seeds")
    if len(listed) != number:
        raise RequestError(f"{len(listed)} seeds were given for {number} forks; one for each is needed, or none at all")
    return listed
