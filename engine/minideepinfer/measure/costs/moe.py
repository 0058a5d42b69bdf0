"""Mixture of experts: three products for every pair of a token and an expert held here, on packed weights."""

from __future__ import annotations

from minideepinfer.measure.costs import ELEMENT_BYTES, FLOAT32, INT32, arithmetic
from minideepinfer.operators.cost import Cost
from minideepinfer.operators.problem import MoeProblem

GROUP = 32
"""Columns of a packed row that share an exponent byte."""
GATE_BYTES = 2
"""Of a gate weight, bfloat16 as stored."""


def gate_cost(problem: MoeProblem, num_tokens: int) -> Cost:
    """The least that choosing experts costs: logits of all experts; ids and weights are written."""
    moved = _rows(problem, num_tokens) + _gate_weights(problem) + _routing(problem, num_tokens)
    return Cost(_gate_flops(problem, num_tokens), moved)


def experts_cost(problem: MoeProblem, num_tokens: int, rows_read: int, num_pairs: int, num_experts: int) -> Cost:
    """The least that the experts of this rank cost, the routing given; without the shared one.

    Where activations are quantised, operands are numbers of 8 and of 4 bits, and the products may be fp8.

    Args:
        problem: the layer's.
        num_tokens: rows, all of which are written.
        rows_read: rows with an expert here.
        num_pairs: pairs of a row and an expert here.
        num_experts: experts here that have a row.
    """
    rows = _rows(problem, rows_read + num_tokens) + _routing(problem, num_tokens)
    return Cost(_expert_flops(problem, num_pairs), rows + num_experts * _expert_weights(problem))


def layer_cost(problem: MoeProblem, num_tokens: int, num_pairs: int, num_experts: int) -> Cost:
    """The least that gate, experts and shared expert cost in one call: rows are read once, the routing stays inside.

    The shared expert's weights are in the compute dtype, and so are its products.
    """
    shared = 3 * problem.hidden_size * problem.intermediate_size
    weights = _gate_weights(problem) + num_experts * _expert_weights(problem) + shared * ELEMENT_BYTES[problem.dtype]
    products = Cost({arithmetic(problem): 2 * num_tokens * shared}, _rows(problem, 2 * num_tokens) + weights)
    return products + Cost(_gate_flops(problem, num_tokens), 0) + Cost(_expert_flops(problem, num_pairs), 0)


def _gate_flops(problem: MoeProblem, num_tokens: int) -> dict[str, int]:
    return {arithmetic(problem): 2 * num_tokens * problem.num_experts * problem.hidden_size}


def _expert_flops(problem: MoeProblem, num_pairs: int) -> dict[str, int]:
    kind = "fp8" if problem.activation_quantization == "released" else arithmetic(problem)
    return {kind: 6 * num_pairs * problem.hidden_size * problem.intermediate_size}


def _rows(problem: MoeProblem, number: int) -> int:
    return number * problem.hidden_size * ELEMENT_BYTES[problem.dtype]


def _routing(problem: MoeProblem, num_tokens: int) -> int:
    return num_tokens * problem.topk * (INT32 + FLOAT32)


def _gate_weights(problem: MoeProblem) -> int:
    return problem.num_experts * (problem.hidden_size * GATE_BYTES + FLOAT32)


def _expert_weights(problem: MoeProblem) -> int:
    weights = 3 * problem.hidden_size * problem.intermediate_size
    return weights // 2 + weights // GROUP
