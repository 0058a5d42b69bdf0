"""`indexed`: attention that reads rings, new entries and pages through their tables, in the kernel (spec 3.8)."""

from __future__ import annotations

import torch
from minideepinfer.operators import Batch, BuildContext, Selection
from minideepinfer.operators.problem import AttentionProblem
from torch import Tensor

from minideepinfer_attention.direct import DirectMetadata, direct_attention
from minideepinfer_attention.tiles import FORM, num_programs


class IndexedAttention:
    """See `AttentionOperator`."""

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        self.form = FORM
        self._problem = problem
        self._programs = num_programs(device)
        self._no_sink = torch.full((problem.num_heads,), -torch.inf, device=device)

    def prepare(self, batch: Batch) -> DirectMetadata:
        """Move what the kernel needs to the device."""
        return DirectMetadata.of(batch)

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
        metadata: DirectMetadata,
    ) -> Tensor:
        """See `AttentionOperator.run`."""
        return direct_attention(
            q,
            window_new,
            window_ring,
            global_kv,
            selection,
            self._no_sink if sink is None else sink,
            cos,
            sin,
            scale,
            metadata,
            self._problem.sliding_window,
            self._problem.compress_ratio,
            self._programs,
        )


def build(context: BuildContext) -> IndexedAttention:
    """Build `indexed`."""
    return IndexedAttention(context.problem, context.device)
