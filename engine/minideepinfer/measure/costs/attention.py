"""Attention: two products with every key a row sees."""

from __future__ import annotations

from minideepinfer.measure.costs import ELEMENT_BYTES, FLOAT32, INT32, arithmetic
from minideepinfer.operators.cost import Cost
from minideepinfer.operators.problem import AttentionProblem


def attention_cost(problem: AttentionProblem, num_tokens: int, num_keys: int, distinct_keys: int) -> Cost:
    """The least that one layer's attention costs, with a sink.

    Args:
        problem: the layer's.
        num_tokens: rows.
        num_keys: keys of all rows, window and selected; one that two rows see counts twice.
        distinct_keys: entries of the cache, and of this step, that some row sees.
    """
    width = problem.num_heads * problem.head_dim
    heads = 2 * num_tokens * width * ELEMENT_BYTES[problem.dtype]
    keys = distinct_keys * problem.head_dim * ELEMENT_BYTES[problem.cache_layout]
    rotation = num_tokens * problem.rope_dim * FLOAT32
    selection = num_tokens * problem.index_topk * INT32 if problem.compress_ratio else 0
    sink = problem.num_heads * FLOAT32
    return Cost({arithmetic(problem): 4 * width * num_keys}, heads + keys + rotation + selection + sink)
