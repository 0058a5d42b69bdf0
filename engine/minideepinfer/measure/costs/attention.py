"""Attention: two products with every key a row sees."""

from __future__ import annotations

from dataclasses import dataclass

from minideepinfer.cache.entry_bytes import entry_bytes
from minideepinfer.measure.costs import ELEMENT_BYTES, FLOAT32, INT32, arithmetic
from minideepinfer.operators.cost import Cost
from minideepinfer.operators.problem import AttentionProblem


@dataclass(frozen=True)
class DistinctKeys:
    """Keys that some row sees, each counted once: this step's entries, older ones in rings, and global entries."""

    step: int
    ring: int
    pool: int = 0


def attention_cost(problem: AttentionProblem, num_tokens: int, num_keys: int, distinct: DistinctKeys) -> Cost:
    """The least that one layer's attention costs, with a sink.

    Args:
        problem: the layer's.
        num_tokens: rows.
        num_keys: keys of all rows, window and selected; one that two rows see counts twice.
        distinct: keys that have to be read.
    """
    width = problem.num_heads * problem.head_dim
    heads = 2 * num_tokens * width * ELEMENT_BYTES[problem.dtype]
    keys = distinct.step * problem.head_dim * ELEMENT_BYTES[problem.dtype]
    keys += distinct.ring * entry_bytes(problem.cache_layout, "window", problem.head_dim)
    keys += distinct.pool * entry_bytes(problem.cache_layout, "main", problem.head_dim)
    rotation = num_tokens * problem.rope_dim * FLOAT32
    selection = num_tokens * problem.index_topk * INT32 if problem.compress_ratio else 0
    sink = problem.num_heads * FLOAT32
    return Cost({arithmetic(problem): 4 * width * num_keys}, heads + keys + rotation + selection + sink)
