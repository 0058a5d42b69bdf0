"""Tokens that are taken back leave no trace."""

from __future__ import annotations

import pytest
import torch
from engine_fixtures import PAGE_TOKENS, poison, runner_of, text_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minideepinfer.cache.pages import PageAllocator
from minideepinfer.errors import RequestError
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import ScheduledRequest, Scheduler
from test_cache import PACKED, stored
from torch import Tensor

QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class Played:
    """One request that runs, and may take tokens back."""

    def __init__(self, name: str, prompt: tuple[int, ...], packed: bool = False) -> None:
        self.runner: Runner = runner_of(name, "released", cache=PACKED) if packed else runner_of(name)
        poison(self.runner)
        text = self.runner.config.text_config
        self.scheduler = Scheduler(PageAllocator(64, PAGE_TOKENS[name]), 4, 4096, 4096, 1 + text.dspark_block_size)
        self.request = Request(0, list(prompt), len(prompt), 300, "kept")
        self.scheduler.add(self.request)
        self.scheduler.schedule()
        self.run(len(prompt))

    def run(self, count: int) -> Tensor:
        (result,) = self.runner.execute([ScheduledRequest(self.request, count)])
        return result.logits

    def extend(self, ids: tuple[int, ...]) -> Tensor:
        self.request.token_ids += ids
        return self.run(len(ids))

    def state(self) -> dict[str, Tensor]:
        return stored(self.runner, self.request)


@QUICK
@given(st.sampled_from(["tiny-a", "tiny-b"]), st.booleans(), st.integers(34, 60), st.data())
def test_a_draft_that_is_taken_back_whole_leaves_every_bit(
    name: str, packed: bool, length: int, data: st.DataObject
) -> None:
    prompt, rest = text_tokens(name, 1, length), text_tokens(name, 9, 7)
    expected = Played(name, prompt, packed).extend(rest)
    played = Played(name, prompt, packed)
    block = played.runner.config.text_config.dspark_block_size
    for seed in range(2, 2 + data.draw(st.integers(1, 3))):
        before = played.state()
        played.extend(text_tokens(name, seed, data.draw(st.integers(1, block))))
        played.scheduler.truncate(played.request, length)
        after = played.state()
        assert before.keys() == after.keys()
        for key in before:
            assert torch.equal(before[key], after[key]), key
    assert torch.equal(played.extend(rest), expected)


@QUICK
@given(st.sampled_from(["tiny-a", "tiny-b"]), st.integers(34, 60), st.data())
def test_what_is_kept_of_a_draft_goes_on_like_a_request_that_never_saw_the_rest(
    name: str, length: int, data: st.DataObject
) -> None:
    prompt, draft, rest = (text_tokens(name, seed, count) for seed, count in ((1, length), (2, 6), (3, 9)))
    block = Played(name, prompt).runner.config.text_config.dspark_block_size
    kept = data.draw(st.integers(1, block))
    plain = Played(name, prompt)
    plain.extend(draft[:kept])
    expected_state = plain.state()
    expected = plain.extend(rest)
    played = Played(name, prompt)
    played.extend(draft[: block + 1])
    played.scheduler.truncate(played.request, length + kept)
    state = played.state()
    assert state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
    found = played.extend(rest)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_too_much_and_the_prompt_are_refused() -> None:
    played = Played("tiny-a", text_tokens("tiny-a", 1, 40))
    block = played.runner.config.text_config.dspark_block_size
    played.extend(text_tokens("tiny-a", 2, block + 1))
    played.extend(text_tokens("tiny-a", 3, 4))
    total = 40 + block + 1 + 4
    for wrong in (total - block - 1, 39, total + 1):
        with pytest.raises(RequestError, match=f"cannot go back to {wrong} tokens; it has {total} computed"):
            played.scheduler.truncate(played.request, wrong)
    played.scheduler.truncate(played.request, total - block)
    assert played.request.num_computed_tokens == len(played.request.token_ids) == total - block


def test_going_back_again_and_again_reaches_no_further() -> None:
    """Slots of the ring behind the first place were reused by then: what lay there is gone."""
    prompt, rest = text_tokens("tiny-a", 1, 40), text_tokens("tiny-a", 3, 9)
    block = runner_of("tiny-a").config.text_config.dspark_block_size
    draft, least = text_tokens("tiny-a", 2, 2 * block), 40 + block
    plain = Played("tiny-a", prompt)
    plain.extend(draft[:block])
    expected = plain.extend(rest)
    played = Played("tiny-a", prompt)
    played.extend(draft[:block])
    played.extend(draft[block:])
    played.scheduler.truncate(played.request, least + 1)
    with pytest.raises(RequestError, match=f"cannot go back to {least - 1} tokens; .* {least} to {least + 1} tokens"):
        played.scheduler.truncate(played.request, least - 1)
    played.scheduler.truncate(played.request, least)
    assert torch.equal(played.extend(rest), expected)


def test_taking_back_what_is_known_but_not_computed() -> None:
    played = Played("tiny-a", text_tokens("tiny-a", 1, 40))
    played.request.token_ids += [5, 6]
    played.scheduler.truncate(played.request, 41)
    assert (played.request.num_computed_tokens, len(played.request.token_ids)) == (40, 41)
