"""Requests whose tokens are given instead of sampled, and what tests look up in a tree of prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from minideepinfer.cache.prefix_tree import PrefixTree
from minideepinfer.runtime.request import Request
from torch import Tensor

LONGEST, BLOCK = 72, 5
"""Tokens of a request at most, and of a draft block."""


@dataclass(eq=False)
class Drafted(Request):
    """Behind its prompt it runs up to `draft` known tokens a step, as a draft that is verified does."""

    draft: int = 1

    def twin(self, request_id: int) -> Drafted:
        return Drafted(**vars(super().twin(request_id)), draft=self.draft)

    @property
    def num_pending_tokens(self) -> int:
        if self.in_prompt:
            return super().num_pending_tokens
        return min(self.draft, len(self.token_ids) - self.num_computed_tokens)


class Scripted:
    """Stands for a `Generation`: its tokens are not sampled but those of a seed, the same at the same position.

    Attributes:
        rows: logits by position that were not compared yet.
        final: tokens that no rollback may reach any more.
        asked: its next rows are to be compared at once.
    """

    params, prompt_logprobs = None, ()

    def __init__(self, request: Drafted, seed: int) -> None:
        self.request, self.seed = request, seed
        self.finish_reason: str | None = None
        self.rows: dict[int, Tensor] = {}
        self.final, self.asked = request.num_prompt_tokens, False

    def accept(self, positions: range, logits: Tensor) -> None:
        request = self.request
        self.rows |= dict(zip(positions, logits, strict=True))
        self.final = max(self.final, request.num_computed_tokens - BLOCK)
        if request.all_computed:
            if request.num_computed_tokens == request.max_total_tokens:
                self.finish_reason = "length"
            self.extend(request.draft)

    def extend(self, count: int) -> None:
        """Let so many tokens follow those that are known, as far as there is room."""
        request, known = self.request, len(self.request.token_ids)
        request.token_ids += tokens(self.seed, LONGEST)[known : min(known + count, request.max_total_tokens)]

    def fork(self, request: Drafted, seed: int) -> Scripted:
        child = Scripted(request, seed)
        child.final, child.asked = self.final, True
        return child

    def abort(self) -> None:
        self.finish_reason = "abort"


@cache
def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(90), k=length))


def published(tree: PrefixTree) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Every node of a tree, with all tokens up to its end."""
    stack = [((), tree._root)]
    while stack:
        ids, node = stack.pop()
        stack += [((*ids, *edge), child) for edge, child in node.children.items()]
        if ids:
            yield ids, node
