"""Indexer: a weighted sum over heads of products with every key that may be selected."""

from __future__ import annotations

from minideepinfer.cache.entry_bytes import entry_bytes
from minideepinfer.measure.costs import ELEMENT_BYTES, INT32, arithmetic
from minideepinfer.operators.cost import Cost
from minideepinfer.operators.problem import IndexerProblem


def indexer_cost(problem: IndexerProblem, num_tokens: int, num_scores: int, distinct_keys: int) -> Cost:
    """The least that selecting for one layer costs.

    Args:
        problem: the layer's.
        num_tokens: rows.
        num_scores: entries that may be selected, of all rows: visible, and in a candidate block where these are used.
        distinct_keys: entries among them; one that two rows see counts once.
    """
    heads, dim, size = problem.num_heads, problem.head_dim, ELEMENT_BYTES[problem.dtype]
    queries = num_tokens * heads * (dim + 1) * size
    keys = distinct_keys * entry_bytes(problem.cache_layout, "index", dim)
    blocks = problem.candidate_topk_blocks if problem.emits_candidates or problem.uses_candidates else 0
    chosen = num_tokens * (problem.topk + blocks) * INT32
    return Cost({arithmetic(problem): 2 * num_scores * heads * (dim + 1)}, queries + keys + chosen)
