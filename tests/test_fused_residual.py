"""`residual:fused` on the CPU, its kernels interpreted: whole models, and how the work is cut."""

from __future__ import annotations

import pytest
import torch
from minideepinfer import LLM, EngineConfig
from minideepinfer.operators import HyperConnectionWeights, load_registry
from minideepinfer.testing.recipes.batch import context
from minideepinfer.testing.recipes.residual import ResidualRecipe
from minideepinfer_residual.fused import FusedResidual, Tile, build, split_weights

TOKENS = [[0, 396, 739, 23, 5], [0, 1550]]


def test_the_model_is_the_same() -> None:
    logits = []
    for name in ("naive", "fused"):
        with LLM(
            "tiny", EngineConfig(device="cpu", dtype="float32", kv_quantization="none", ops={"residual": name})
        ) as llm:
            logits.append(torch.cat(llm.forward(TOKENS)))
    # float32 sums in another order; relative L2 as in `verify`, whose bound for whole sequences is 1e-4.
    assert (logits[0] - logits[1]).norm() < 1e-4 * logits[0].norm()


def test_five_streams_are_refused_by_name() -> None:
    operator = load_registry().get("residual", "fused").declaration
    problem = ResidualRecipe(num_streams=5).build().problem
    assert operator.refuses is not None and operator.refuses(problem) == ["has 5 streams, needs at most 4"]


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_two_parts_hold_sixteen_bits_of_a_weight(streams: int) -> None:
    columns = streams * (2 + streams)
    fn = torch.randn(columns, streams * 40, generator=torch.Generator().manual_seed(0))
    made = split_weights(HyperConnectionWeights(fn, torch.zeros(columns), torch.ones(3)), torch.bfloat16)
    whole = made.fn.double().unflatten(1, (-1, 2)).sum(-1)
    assert torch.equal(made.fn, made.fn.bfloat16().to(made.fn.dtype))
    assert ((whole[:, :columns].T - fn.double()).abs() <= 2.0**-16 * fn.double().abs()).all()
    assert not whole[:, columns:].any()


@pytest.mark.parametrize("width", [1, 31, 20480, 20481])
def test_every_channel_has_one_program(width: int) -> None:
    tiles, programs = Tile(64, 128, 4, 3, 8).cut(width)
    assert 1 <= programs <= 8
    assert (programs - 1) * tiles * 128 < width <= programs * tiles * 128


def test_a_row_does_not_depend_on_the_batch() -> None:
    case = ResidualRecipe(tokens=40, num_streams=4, hidden_size=70, dtype="bfloat16", call="advance").build()
    operator: FusedResidual = build(context(case.problem))
    together = case.run(operator)
    for row in (0, 17, 39):
        alone = case.take([row])[0].run(operator)
        # Of the coefficients the GPU promises it too; BLAS, in place of tensor cores, sums by a row's place in a tile.
        assert all(torch.equal(alone[name][0], together[name][row]) for name in ("streams", "x"))
