"""`fused`: attention as matrix tiles, both products on tensor cores (spec 3.8).

Three schedules, chosen by the problem. Decode has few rows: it splits their keys among programs and reads all of them
in place. Window-only prefill shares a tile of keys between neighbouring tokens. Other prefill takes a token at a time
to its own list of keys, and so does decode where there are rows enough and the Gluon kernel serves. Packed entries are
decoded where they are read in place, and before where many rows read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minideepinfer.operators import AttentionOperator, Batch, BuildContext, Phase, Selection
from minideepinfer.operators.problem import AttentionProblem
from torch import Tensor

from minideepinfer_attention.direct import DirectAttention
from minideepinfer_attention.sparse import SparseAttention
from minideepinfer_attention.tiles import PACKED, suits_gluon
from minideepinfer_attention.window import LARGEST_WINDOW, WindowAttention

MANY_ROWS = 17
"""From here on a program for each row is faster than splitting keys, on one H200."""
UNPACKED_AT_MOST = 8
"""Entries unpacked for each one that a row reads. On one H200 decoding in the tile takes as long at about 10."""


@dataclass(frozen=True, eq=False)
class _Chosen:
    """What serves a batch, and what it has prepared."""

    operator: AttentionOperator
    metadata: Any


class FewOrMany:
    """See `AttentionOperator`; two schedules, one of which is chosen for each batch."""

    def __init__(
        self, few: DirectAttention, many: SparseAttention, is_many: Callable[[Batch], bool], when: str
    ) -> None:
        self._few, self._many, self._is_many = few, many, is_many
        self.fuses = few.fuses
        self.form = few.form if few.form == many.form else f"{few.form}, {many.form} {when}"

    def prepare(self, batch: Batch) -> _Chosen:
        """What the schedule for this batch prepares."""
        operator = self._many if self._is_many(batch) else self._few
        return _Chosen(operator, operator.prepare(batch))

    def run(
        self,
        q: Tensor,
        window_new: Tensor,
        window_ring: Tensor,
        global_kv: Tensor | None,
        selection: Selection | None,
        sink: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        scale: float,
        metadata: _Chosen,
    ) -> Tensor:
        """See `AttentionOperator.run`."""
        inputs = q, window_new, window_ring, global_kv, selection, sink, cos, sin, scale
        return metadata.operator.run(*inputs, metadata.metadata)


def _reads_many_entries(problem: AttentionProblem) -> Callable[[Batch], bool]:
    """Whether rows read so many entries that all may be unpacked for them."""

    def check(batch: Batch) -> bool:
        read = batch.num_tokens * problem.index_topk
        return UNPACKED_AT_MOST * read >= sum(batch.last_visible_entries(problem.compress_ratio))

    return check


def build(context: BuildContext) -> AttentionOperator:
    """Build `fused`."""
    problem, device, clock = context.problem, context.device, context.clock
    packed = problem.cache_layout == PACKED
    if problem.phase is Phase.DECODE and (not suits_gluon(problem) or (packed and problem.compress_ratio)):
        return DirectAttention(problem, device)
    if problem.phase is Phase.PREFILL and not problem.compress_ratio and problem.sliding_window <= LARGEST_WINDOW:
        return WindowAttention(problem, device, clock)
    sparse = SparseAttention(problem, device, clock)
    if problem.phase is Phase.DECODE:
        many = f"from {MANY_ROWS} rows"
        return FewOrMany(DirectAttention(problem, device), sparse, lambda batch: batch.num_tokens >= MANY_ROWS, many)
    if packed and problem.compress_ratio:
        direct = DirectAttention(problem, device)
        return FewOrMany(direct, sparse, _reads_many_entries(problem), "where rows read many entries")
    return sparse
