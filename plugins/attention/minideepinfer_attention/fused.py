"""`fused`: attention as matrix tiles, both products on tensor cores (spec 3.8).

Three schedules, chosen by the problem. Decode has few rows: it splits their keys among programs and reads all of them
in place. Window-only prefill shares a tile of keys between neighbouring tokens. Other prefill takes a token at a time
to its own list of keys, and so does decode where there are rows enough and the Gluon kernel serves.
"""

from __future__ import annotations

import torch
from minideepinfer.operators import AttentionOperator, Batch, BuildContext, Phase, Selection, StageClock
from minideepinfer.operators.problem import AttentionProblem
from torch import Tensor

from minideepinfer_attention.direct import DirectAttention, DirectMetadata
from minideepinfer_attention.sparse import SparseAttention, SparseMetadata
from minideepinfer_attention.tiles import suits_gluon
from minideepinfer_attention.window import LARGEST_WINDOW, WindowAttention

MANY_ROWS = 17
"""From here on a program for each row is faster than splitting keys, on one H200."""


class DecodeAttention:
    """See `AttentionOperator`; splits the keys of few rows, and gives each of `MANY_ROWS` a program."""

    def __init__(self, problem: AttentionProblem, device: torch.device, clock: StageClock) -> None:
        self._few, self._many = DirectAttention(problem, device), SparseAttention(problem, device, clock)
        self.fuses = self._few.fuses
        self.form = f"{self._few.form}, {self._many.form} from {MANY_ROWS} rows"

    def prepare(self, batch: Batch) -> DirectMetadata | SparseMetadata:
        """What the schedule for so many rows prepares."""
        return self._many.prepare(batch) if batch.num_tokens >= MANY_ROWS else self._few.prepare(batch)

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
        metadata: DirectMetadata | SparseMetadata,
    ) -> Tensor:
        """See `AttentionOperator.run`."""
        inputs = q, window_new, window_ring, global_kv, selection, sink, cos, sin, scale
        if isinstance(metadata, SparseMetadata):
            return self._many.run(*inputs, metadata)
        return self._few.run(*inputs, metadata)


def build(context: BuildContext) -> AttentionOperator:
    """Build `fused`."""
    problem = context.problem
    if problem.phase is Phase.DECODE:
        if suits_gluon(problem):
            return DecodeAttention(problem, context.device, context.clock)
        return DirectAttention(problem, context.device)
    if not problem.compress_ratio and problem.sliding_window <= LARGEST_WINDOW:
        return WindowAttention(problem, context.device, context.clock)
    return SparseAttention(problem, context.device, context.clock)
