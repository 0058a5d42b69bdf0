"""The formulas of operations and bytes, against loops that count them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from minideepinfer.measure.floor import floor_ms
from minideepinfer.measure.kernels import attention, comm, epilogue, indexer, moe, residual
from minideepinfer.operators import Cost
from minideepinfer.testing.recipes.attention import AttentionCase, AttentionRecipe, selected_entries, window_positions
from minideepinfer.testing.recipes.batch import BatchRecipe, locate
from minideepinfer.testing.recipes.comm import CommRecipe
from minideepinfer.testing.recipes.epilogue import EpilogueRecipe, InjectRecipe
from minideepinfer.testing.recipes.indexer import IndexerCase, IndexerRecipe
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe
from minideepinfer.testing.recipes.residual import ResidualRecipe

SIZES = {"float32": 4, "bfloat16": 2}
RAGGED = BatchRecipe((3, 0, 2), (7, 4, 0), window_start=(3, 0, 0), page_tokens=8)
DECODE = BatchRecipe((1, 1), (9, 30), page_tokens=8, decode=True)


class Count:
    """Multiply-adds one by one, and every number of memory that takes part, once."""

    def __init__(self) -> None:
        self.flops = 0
        self._touched: dict[tuple[Any, ...], int] = {}

    def multiply_add(self) -> None:
        """Two operations."""
        self.flops += 2

    def touch(self, size: int, *place: Any) -> None:
        """Note a number, or a byte, of a tensor."""
        self._touched[place] = size

    def rows(self, size: int, name: str, *shape: int) -> None:
        """Note a whole tensor."""
        for place in torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape)).tolist():
            self.touch(size, name, *place)

    @property
    def num_bytes(self) -> int:
        """Of everything noted."""
        return sum(self._touched.values())


def holds(cost: Cost, count: Count) -> None:
    """A formula's result is what was counted."""
    assert (cost.total_flops, cost.num_bytes) == (count.flops, count.num_bytes)


def keys_of(case: AttentionCase, row: int) -> Iterator[tuple[Any, ...]]:
    """Where the keys of a row lie."""
    batch = case.batch
    request = int(batch.request_ids[row])
    for position in window_positions(batch, case.problem.sliding_window, row):
        offset = position - batch.context_lens[request]
        if offset >= 0:
            yield "new", int(batch.cu_seqlens[request]) + offset
        else:
            yield "ring", int(batch.ring_table[request]), position % case.window_ring.shape[1]
    if case.selection is not None:
        for entry in selected_entries(batch, case.selection, case.problem.compress_ratio, row):
            yield "pool", *locate(batch, request, entry, case.problem.compress_ratio)


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("batch", [RAGGED, DECODE, replace(RAGGED, padding=(0,))], ids=["ragged", "decode", "padding"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention(ratio: int, batch: BatchRecipe, dtype: str) -> None:
    recipe = AttentionRecipe(batch, dtype, 2, 6, 2, 4, ratio, 3, with_lens=True, sink=1.0, seed=ratio)
    case, count, size = recipe.build(), Count(), SIZES[dtype]
    for row in range(len(case.q)):
        for key in keys_of(case, row):
            for _head in range(2):
                for channel in range(6):
                    count.touch(size, *key, channel)
                    count.multiply_add()  # q k
                    count.multiply_add()  # p k
    tokens = len(case.q)
    for name in ("q", "out"):
        count.rows(size, name, tokens, 2, 6)
    for name in ("cos", "sin"):
        count.rows(4, name, tokens, 1)
    count.rows(4, "sink", 2)
    if ratio:
        count.rows(4, "selection", tokens, 3)
    holds(attention.cost(case), count)


def candidate_entries(case: IndexerCase, row: int) -> list[int]:
    """Entries that may be selected."""
    entries = range(int(case.batch.visible_entries(case.problem.compress_ratio)[row]))
    if case.candidates is None:
        return list(entries)
    named = set(case.candidates[row].tolist())
    return [entry for entry in entries if entry // case.problem.candidate_block_size in named]


@pytest.mark.parametrize("role", ["plain", "source", "reindex"])
@pytest.mark.parametrize("batch", [RAGGED, DECODE], ids=["ragged", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_indexer(role: str, batch: BatchRecipe, dtype: str) -> None:
    case = IndexerRecipe(batch, dtype, 2, 4, 2, 3, role, candidate_topk_blocks=5, seed=3).build()
    if case.candidates is not None:
        case.candidates[:, 1] = case.candidates[:, 0]
    count, size = Count(), SIZES[dtype]
    for row in range(len(case.q)):
        for entry in candidate_entries(case, row):
            for _head in range(2):
                for channel in range(4):
                    count.touch(size, "key", int(case.batch.request_ids[row]), entry, channel)
                    count.multiply_add()
                count.multiply_add()  # its weight
    tokens = len(case.q)
    count.rows(size, "q", tokens, 2, 4)
    count.rows(size, "weights", tokens, 2)
    count.rows(4, "indices", tokens, 3)
    if role != "plain":
        count.rows(4, "candidates", tokens, 5)
    holds(indexer.cost(case), count)


def count_expert(count: Count, row: int, expert: int, recipe: MoeRecipe, size: int) -> None:
    """Three products, on nibbles and exponents; of a dense one if the expert is -1."""
    for i in range(recipe.intermediate_size):
        for h in range(recipe.hidden_size):
            for matrix, line, column in (("w1", i, h), ("w3", i, h), ("w2", h, i)):
                count.multiply_add()
                count.touch(size, "x", row, h)
                if expert < 0:
                    count.touch(size, matrix, line, column)
                else:
                    count.touch(1, matrix, expert, line, column // 2)
                    count.touch(1, matrix + " scale", expert, line, column // 32)


def count_gate(count: Count, tokens: int, recipe: MoeRecipe, size: int) -> None:
    """Logits."""
    for row in range(tokens):
        for expert in range(recipe.num_experts):
            count.touch(4, "bias", expert)
            for h in range(recipe.hidden_size):
                count.multiply_add()
                count.touch(size, "x", row, h)
                count.touch(2, "gate", expert, h)


def local_pairs(case: MoeCase, ids: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Rows and their experts here."""
    for row, names in enumerate(ids.tolist()):
        for expert in names:
            if 0 <= expert - case.weights.experts.expert_start < case.weights.experts.num_local:
                yield row, expert


SMALL = MoeRecipe(
    tokens=3, hidden_size=64, intermediate_size=32, num_experts=4, num_local_experts=2, expert_start=1, topk=2
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ["any", "none", "twice"])
def test_experts(dtype: str, routing: str) -> None:
    recipe = replace(SMALL, dtype=dtype, routing=routing)
    case, count, size = recipe.build(), Count(), SIZES[dtype]
    assert case.routing is not None
    for row, expert in local_pairs(case, case.routing[0]):
        count_expert(count, row, expert, recipe, size)
    count.rows(size, "y", 3, 64)
    count.rows(4, "ids", 3, 2)
    count.rows(4, "weights", 3, 2)
    holds(moe.cost_of_experts(case), count)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_and_layer(dtype: str) -> None:
    recipe = replace(SMALL, dtype=dtype, routing="gate", shared=True)
    case, count, size = recipe.build(), Count(), SIZES[dtype]
    count_gate(count, 3, recipe, size)
    gate = Count()
    count_gate(gate, 3, recipe, size)
    gate.rows(4, "ids", 3, 2)
    gate.rows(4, "weights", 3, 2)
    holds(moe.cost_of_gate(case), gate)
    for row, expert in local_pairs(case, moe.route(case)[0]):
        count_expert(count, row, expert, recipe, size)
    for row in range(3):
        count_expert(count, row, -1, recipe, size)
    count.rows(size, "y", 3, 64)
    holds(moe.cost_of_layer(case), count)


def test_quantised_activations_make_the_experts_products_fp8_and_no_others() -> None:
    case = replace(SMALL, dtype="bfloat16", routing="gate", shared=True, activation_quantization="released").build()
    plain = moe.cost_of_layer(replace(case, problem=replace(case.problem, activation_quantization="none")))
    cost = moe.cost_of_layer(case)
    pairs = len(list(local_pairs(case, moe.route(case)[0])))
    assert cost.flops["fp8"] == 6 * pairs * 64 * 32
    assert (cost.total_flops, cost.num_bytes) == (plain.total_flops, plain.num_bytes)


@pytest.mark.parametrize("call", ["enter", "advance", "mix", "normalise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_residual(call: str, dtype: str) -> None:
    tokens, streams, hidden = 3, 2, 5
    case = ResidualRecipe(tokens, dtype, call, streams, hidden).build()
    count, size, columns = Count(), SIZES[dtype], streams * (2 + streams)
    for row in range(tokens):
        for channel in range(hidden):
            for stream in range(streams):
                count.touch(size, "streams", row, stream, channel)
                if call in ("advance", "mix"):
                    for source in range(streams):
                        count.multiply_add()
                        count.touch(4, "comb", row, source, stream)
                    count.multiply_add()  # the output
                    count.touch(size, "output", row, channel)
                    count.touch(4, "post", row, stream)
                    count.touch(size, "new streams", row, stream, channel)
                if call != "mix":
                    count.multiply_add()  # the collapse
                    count.touch(4, "pre", row, stream)
                if call in ("enter", "advance"):
                    count.multiply_add()  # the mean square of the streams
                    for column in range(columns):
                        for _part in range(2 if dtype == "bfloat16" else 1):
                            count.multiply_add()
                        count.touch(4, "fn", column, stream, channel)
            if call != "mix":
                count.multiply_add()  # the mean square of x
                count.touch(4, "norm", channel)
                count.touch(size, "x", row, channel)
    if call in ("enter", "advance"):
        count.rows(4, "base", columns)
        count.rows(4, "scale", 3)
        count.rows(4, "coefficients", tokens, columns)
    holds(residual.cost(case), count)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("pairs", [0, 3])
@pytest.mark.parametrize("heads", [0, 2])
def test_epilogue(heads: int, pairs: int, norm: bool, quantization: Any, in_place: bool) -> None:
    recipe = EpilogueRecipe(3, "bfloat16", heads, 32, norm, pairs, quantization, in_place)
    count, width = Count(), recipe.width
    for token in range(3):
        for head in range(max(1, heads)):
            for channel in range(width):
                turned = channel >= width - 2 * pairs
                if norm:
                    count.multiply_add()  # the mean square
                    count.touch(4, "norm", channel)
                if turned:
                    for table in ("cos", "sin"):
                        count.multiply_add()  # a cos - b sin, or a sin + b cos
                        count.touch(4, table, token, (channel - width + 2 * pairs) // 2)
                if norm or turned or quantization != "none" or not in_place:
                    count.touch(2, "x", token, head, channel)
                    count.touch(2, "y", token, head, channel)
    holds(epilogue.cost(recipe.build()), count)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inject(dtype: str) -> None:
    case, count, size = InjectRecipe(3, dtype, 2, 5).build(), Count(), SIZES[dtype]
    for token in range(3):
        for stream in range(2):
            for channel in range(5):
                for _sum in ("x weight k", "x^2", "k^2", "x + g v"):
                    count.multiply_add()
                count.touch(4, "weight", stream, channel)
                count.touch(size, "x", token, stream, channel)
                count.touch(size, "new x", token, stream, channel)
                count.touch(size, "key", token, stream, channel)
                count.touch(size, "value", token, channel)
    holds(epilogue.cost(case), count)


def test_fetched_rows() -> None:
    case, count = CommRecipe(rows=9, row_bytes=6, seed=2).build(), Count()
    for number, row in enumerate(case.row_ids.tolist()):
        count.touch(8, "id", number)
        for byte in range(6):
            count.touch(1, "table", row, byte)
            count.touch(1, "out", number, byte)
    assert len(case.row_ids.unique()) < 9
    holds(comm.cost(case), count)


def test_costs_add_up_by_arithmetic() -> None:
    total = Cost({"bf16": 3}, 5) + Cost({"bf16": 1, "fp8": 2}, 6)
    assert total == Cost({"bf16": 4, "fp8": 2}, 11)
    assert total.at("fp8") == Cost({"fp8": 6}, 11)


def test_a_floor_is_the_larger_of_arithmetic_and_bytes() -> None:
    rates = {"copy_tb_s": 2.0, "bf16_tflops": 4.0, "fp8_tflops": 8.0}
    assert floor_ms(Cost({"bf16": 8 * 10**9, "fp8": 8 * 10**9}, 10**9), rates) == pytest.approx(3.0)
    assert floor_ms(Cost({"bf16": 10**9}, 10**10), rates) == pytest.approx(5.0)
    assert floor_ms(Cost({}, 0), rates) == 0.0
