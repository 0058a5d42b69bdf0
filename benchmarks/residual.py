"""What `residual: fused` is made of, on one GPU.

    python benchmarks/residual.py [--output FILE]

At the released sizes, 4,096 rows and 64 rows of decode: the coefficients alone, the collapse behind the last block,
cuBLAS for the projection alone (of the same two bfloat16 parts), and a copy of the streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from minideepinfer.operators import Cost
from minideepinfer_residual import fused
from parts import DEVICE, Parts, built, case_of, run

PROBLEMS = (("v41-rank", "advance"), ("decode", "advance, T=64"))


def parts() -> Iterator[Parts]:
    """One problem after the other."""
    return (launches(problem, *case_of("residual", preset, problem)) for preset, problem in PROBLEMS)


def launches(name: str, recipe: Any, case: Any) -> Parts:
    """The launches of one problem."""
    operator, streams = built(fused, case.problem), case.streams
    weights, squares = operator.transform_weights(case.weights), torch.rand(len(streams), device=DEVICE)
    dense = weights.fn[:, : 2 * len(case.weights.fn)].contiguous()
    calls = {
        "advance": lambda: operator.advance(streams, case.output, case.site, weights, case.norm_weight),
        "collapse and norm": lambda: operator.collapse(streams, case.pre, case.norm_weight),
        "coefficients alone": lambda: operator._coefficients(streams, squares, weights),
        "cuBLAS, projection alone": lambda: streams.flatten(1) @ dense,
        "copy of the streams": lambda: streams.clone(),
    }
    row_bytes = len(streams) * recipe.hidden_size * streams.element_size()
    read, reduced = Cost({}, recipe.num_streams * row_bytes), Cost({}, (recipe.num_streams + 1) * row_bytes)
    costs = {"collapse and norm": reduced, "coefficients alone": read, "cuBLAS, projection alone": read}
    return Parts(name, recipe, calls, costs)


if __name__ == "__main__":
    run("residual", __doc__, parts)
