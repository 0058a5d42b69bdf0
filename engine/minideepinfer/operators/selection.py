"""The result of an indexer: which global entries a row attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_INDICES = "token_indices/1"
"""Layout name of `Selection`: logical entry numbers, unordered, -1 anywhere."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Layout `token_indices/1`.

    Attributes:
        indices: int32 `[T, K]`, *logical* entry numbers of the row's own request. -1 means no entry and may stand
            anywhere; an index >= the row's visible entries, or any other negative one, counts as -1. Unordered; an
            entry named twice counts twice.
        lens: int32 `[T]` or None; slots at or past `lens[t]` are never read.
    """

    indices: Tensor
    lens: Tensor | None = None


@dataclass(frozen=True, eq=False)
class IndexerOutput:
    """What an indexer returns.

    Attributes:
        selection: the chosen entries.
        candidates: int32 `[T, candidate_topk_blocks]` block numbers, -1 padded, in any order; None unless the problem
            says `emits_candidates`.
    """

    selection: Selection
    candidates: Tensor | None = None
