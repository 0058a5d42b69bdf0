"""`epilogue:fused` on the CPU, its kernel interpreted: the bits of naive, whole models, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from minideepinfer import LLM, EngineConfig
from minideepinfer.operators import load_registry
from minideepinfer.testing.recipes.batch import context
from minideepinfer.testing.recipes.epilogue import EpilogueRecipe
from minideepinfer.testing.tensors import same_bits
from minideepinfer_epilogue import fused, naive

TOKENS = [[0, 396, 739, 23, 5], [0, 1550]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("pairs", [0, 4, 48])
def test_without_a_norm_the_bits_are_those_of_naive(dtype: str, quantization: str, pairs: int) -> None:
    recipe = EpilogueRecipe(tokens=5, dtype=dtype, heads=3, width=96, pairs=pairs, numbers="uneven")
    for numbers in ("uneven", "grid"):
        case = replace(recipe, quantization=quantization, numbers=numbers).build()  # type: ignore[arg-type]
        found, expected = (case.run(module.build(context(case.problem)))["y"] for module in (fused, naive))
        assert same_bits(found, expected)


def test_in_place_the_result_is_x() -> None:
    case = EpilogueRecipe(tokens=3, heads=2, width=96, pairs=16).build()
    x, first = case.x.clone(), case.x[..., :64].clone()
    found = fused.build(context(case.problem)).run(x, None, case.cos, case.sin, "none", True)
    assert found.data_ptr() == x.data_ptr() and torch.equal(found[..., :64], first)
    assert not torch.equal(found, case.x)


@pytest.mark.parametrize("activations", ["none", "released"])
def test_the_model_is_the_same(activations: str) -> None:
    logits = []
    for name in ("naive", "fused"):
        config = EngineConfig(
            device="cpu", dtype="float32", activation_quantization=activations, ops={"epilogue": name}
        )
        with LLM("tiny", config) as llm:
            logits.append(torch.cat(llm.forward(TOKENS)))
    # float32 sums in another order; relative L2 as in `verify`, whose bound for whole sequences is 1e-4.
    assert (logits[0] - logits[1]).norm() < 1e-4 * logits[0].norm()


def test_rows_that_are_too_wide_are_refused() -> None:
    operator = load_registry().get("epilogue", "fused").declaration
    problem = EpilogueRecipe(width=16384).build().problem
    assert operator.refuses is not None
    assert operator.refuses(problem) == ["has rows of 16384 channels, needs at most 8192"]
