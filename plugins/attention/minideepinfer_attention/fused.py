"""`fused`: attention as matrix tiles, both products on tensor cores (spec 3.8).

Three schedules, chosen by the problem. Decode has few rows: it splits their keys among programs and reads all of them
in place. Window-only prefill shares a tile of keys between neighbouring tokens. Other prefill takes a token at a time
to its own list of keys.
"""

from __future__ import annotations

from minideepinfer.operators import AttentionOperator, BuildContext, Phase

from minideepinfer_attention.direct import DirectAttention
from minideepinfer_attention.sparse import SparseAttention
from minideepinfer_attention.window import LARGEST_WINDOW, WindowAttention


def build(context: BuildContext) -> AttentionOperator:
    """Build `fused`."""
    problem = context.problem
    if problem.phase is Phase.DECODE:
        return DirectAttention(problem, context.device)
    if not problem.compress_ratio and problem.sliding_window <= LARGEST_WINDOW:
        return WindowAttention(problem, context.device, context.clock)
    return SparseAttention(problem, context.device, context.clock)
