"""What `moe: fused` is made of, on one GPU as one rank of four.

    python benchmarks/moe.py [--output FILE]

At the released sizes: the rows that reach a rank in a prefill step, in both precisions of the activations, and whole
layers of 4,096 rows and of 64 in decode. Each launch, and cuBLAS for as many rows of one dense expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from minideepinfer.operators import Cost
from minideepinfer_moe import fused
from minideepinfer_moe.gate import gate_logits, select
from minideepinfer_moe.rows import combine, quantize, shared_expert
from parts import DEVICE, Parts, built, case_of, run

PROBLEMS = (
    ("v41-rank", "experts, T=16384"),
    ("v41-rank", "experts, T=16384, fp8 activations"),
    ("v41-rank", "layer, T=4096"),
    ("decode", "layer, T=64"),
)


def parts() -> Iterator[Parts]:
    """One problem after the other."""
    return (launches(problem, *case_of("moe", preset, problem)) for preset, problem in PROBLEMS)


def launches(name: str, recipe: Any, case: Any) -> Parts:
    """The launches of one problem; the gate and the shared expert where the problem has them."""
    operator, x, dtype = built(fused, case.problem), case.x, case.x.dtype
    weights = operator.transform_weights(case.weights)
    hidden, inner, limit = recipe.hidden_size, recipe.intermediate_size, case.problem.swiglu_limit
    is_rounded = case.problem.activation_quantization == "released"
    routing = case.routing or operator.route(x, weights)
    schedule, products = operator.schedule(routing, weights, dtype), weights.products
    x = quantize(x) if is_rounded else x

    def gate_up() -> Any:
        return products.gate_up(x, weights.experts, schedule, schedule.row_weights, limit, is_rounded)

    r = gate_up()
    y, rows = products.down(r, weights.experts, schedule), int(schedule.expert_offsets[-1])
    touched = int((schedule.expert_offsets.diff() > 0).sum())
    dense_x, dense_r = (torch.randn(rows, width, device=DEVICE).to(dtype) for width in (hidden, inner))
    w13, w2 = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((2 * inner, hidden), (hidden, inner)))
    calls = {
        "schedule": lambda: operator.schedule(routing, weights, dtype),
        "gate_up": gate_up,
        "down": lambda: products.down(r, weights.experts, schedule),
        "combine": lambda: combine(y, schedule, None, dtype),
        "cuBLAS, one dense expert, gate_up": lambda: dense_x @ w13.t(),
        "cuBLAS, one dense expert, down": lambda: dense_r @ w2.t(),
    }
    if is_rounded:
        calls["quantize"] = lambda: quantize(case.x)
    if weights.shared_w13 is not None:
        logits, shared = gate_logits(x, weights.gate), (weights.shared_w13, weights.shared_w2)
        calls |= {
            "gate: logits": lambda: gate_logits(x, weights.gate),
            "gate: selection": lambda: select(logits, weights.gate_bias, recipe.topk, case.problem.routed_scaling),
            "shared expert": lambda: shared_expert(x, *shared, limit, is_rounded),
        }
    arithmetic, packed = "fp8" if is_rounded else "bf16", touched * hidden * inner // 2 * 17 // 16
    costs = {
        "gate_up": Cost({arithmetic: 4 * rows * hidden * inner}, 2 * packed),
        "down": Cost({arithmetic: 2 * rows * hidden * inner}, packed),
        "combine": Cost({}, (rows + len(x)) * hidden * x.element_size()),
    }
    return Parts(name, recipe, calls, costs)


if __name__ == "__main__":
    run("moe", __doc__, parts)
