"""The Engram term against loops written from spec 3.9, in float64."""

from __future__ import annotations

import json
import math
from itertools import repeat
from pathlib import Path

import pytest
import torch
from engine_fixtures import Arrival, play, poison, runner_of, text_tokens
from minideepinfer.config import EngramConfig, ModelConfig
from minideepinfer.model.engram import engram_values, start_fetch
from minideepinfer.model.epilogue import Epilogue
from minideepinfer.model.weights import EngramWeights
from minideepinfer.operators import BuildContext, CommProblem, OperatorOptions, Phase
from minideepinfer.quantization import decode_e8m0
from minideepinfer.testing.recipes.batch import context
from minideepinfer.testing.recipes.epilogue import EpilogueRecipe
from minideepinfer_comm.single import build
from minideepinfer_epilogue.naive import build as build_epilogue
from torch import Tensor

DATA = Path(__file__).parent / "data"
CONFIG = ModelConfig.from_dict(json.loads((DATA / "config.tiny.json").read_text())).text_config
NOTHING = Epilogue({}, round_kv=False, round_activations=False)
"""Inputs of products are left as they are."""
STREAMS, HIDDEN, COLUMNS, WIDTH, ROWS = 4, 32, 6, 32, 50


def single() -> object:
    problem = CommProblem(Phase.PREFILL, "cpu", None, "float32", "none", "none", HIDDEN, 4, 1)
    return build(BuildContext(problem, OperatorOptions(), torch.device("cpu")))


def weights(seed: int = 0) -> EngramWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return EngramWeights(
        table=normal(ROWS, WIDTH).to(torch.float8_e4m3fn).view(torch.uint8),
        table_scale=torch.randint(124, 130, (ROWS, WIDTH // 32), generator=generator, dtype=torch.uint8),
        wkv=normal((STREAMS + 1) * HIDDEN, COLUMNS * WIDTH) / 14,
        gate_weight=normal(STREAMS, HIDDEN) * normal(STREAMS, HIDDEN),
        rows_per_rank=ROWS,
    )


def values_of(ids: Tensor, w: EngramWeights) -> Tensor:
    """`[T, STREAMS + 1, HIDDEN]`."""
    fetched = start_fetch(ids, w, single()).wait()  # type: ignore[arg-type]
    return engram_values(ids, fetched, w, torch.float32, NOTHING, Phase.PREFILL)


def inject(streams: Tensor, values: Tensor, w: EngramWeights) -> Tensor:
    operator = build_epilogue(context(EpilogueRecipe(width=HIDDEN).build().problem))
    return operator.inject(streams, values, w.gate_weight)


def oracle(streams: Tensor, ids: Tensor, w: EngramWeights) -> Tensor:
    """float64 `[T, S, H]`."""
    table = w.table.view(torch.float8_e4m3fn).double() * decode_e8m0(w.table_scale).double()
    result = torch.empty(streams.shape, dtype=torch.float64)
    for token in range(len(streams)):
        memory = torch.cat([table[row] for row in ids[token]])
        projected = w.wkv.double() @ memory
        value = projected[STREAMS * HIDDEN :]
        for i in range(STREAMS):
            x, key = streams[token, i].double(), projected[HIDDEN * i : HIDDEN * (i + 1)]
            dot = float((x * w.gate_weight[i].double() * key).sum())
            dot /= math.sqrt(float(x.square().mean()) + 1e-20) * math.sqrt(float(key.square().mean()) + 1e-20)
            dot /= math.sqrt(HIDDEN)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
            result[token, i] = x + gate * value
    return result


def test_it_equals_the_specification() -> None:
    generator = torch.Generator().manual_seed(5)
    streams = torch.randn(7, STREAMS, HIDDEN, generator=generator)
    ids = torch.randint(0, ROWS, (7, COLUMNS), generator=generator)
    w = weights()
    values = values_of(ids, w)
    assert values.shape == (7, STREAMS + 1, HIDDEN)
    found = inject(streams, values, w)
    # A float32 product of 192 terms and a gate whose slope is at most 500 near 0, where it is floored.
    torch.testing.assert_close(found.double(), oracle(streams, ids, w), rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, streams)


def test_a_zero_stream_gets_a_gate_near_one_half() -> None:
    w = weights()
    values = values_of(torch.zeros(1, COLUMNS, dtype=torch.int64), w)
    found = inject(torch.zeros(1, STREAMS, HIDDEN), values, w)
    gate = 1 / (1 + math.exp(-1e-3))  # sqrt of the floor of 1e-6, sign of +0
    torch.testing.assert_close(found[0, 0], gate * values[0, STREAMS])


def test_no_tokens() -> None:
    w = weights()
    values = values_of(torch.empty(0, COLUMNS, dtype=torch.int64), w)
    assert inject(torch.zeros(0, STREAMS, HIDDEN), values, w).shape == (0, STREAMS, HIDDEN)


def test_bfloat16_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(6)
    streams = torch.randn(7, STREAMS, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(0, ROWS, (7, COLUMNS), generator=generator)
    w = weights()
    values = values_of(ids, w).bfloat16()
    exact = inject(streams.float(), values.float(), w)
    assert torch.equal(inject(streams, values, w), exact.bfloat16())


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_tables_give_the_same_bits_wherever_they_lie(name: str) -> None:
    ids = text_tokens(name, 1, 40)
    logits = {}
    for placement in ("device", "host", "mmap"):
        runner = runner_of(name, engram=EngramConfig(placement=placement))
        poison(runner)
        logits[placement] = play(runner, [Arrival(ids, 33)], repeat(9)).rows(0)[1]
    assert torch.equal(logits["host"], logits["device"])
    assert torch.equal(logits["mmap"], logits["device"])


def test_a_mapped_table_is_not_read() -> None:
    """Loading reads what it reads with tables in memory, less their codes; exponents are read to refuse NaN."""
    read = {place: runner_of("tiny-a", engram=EngramConfig(placement=place)).bytes_read for place in ("device", "mmap")}
    text = runner_of("tiny-a").config.text_config
    assert read["device"] - read["mmap"] == sum(text.engram_num_embeddings) * text.engram_head_dim
