"""What a step costs at least: brute-force counts on small problems, and the arithmetic of spec section 7."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from minideepinfer.config import EngineConfig, LayerSchedule, ModelConfig
from minideepinfer.measure.rank_shape import of_rank
from minideepinfer.measure.step_costs import ExpertRows, StepCosts
from minideepinfer.model.step import Step
from minideepinfer.operators import Stage
from minideepinfer.runtime.batching import build_step, make_parts
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.runtime.setup import Setup

DATA = Path(__file__).parent / "data"
SPEC_RATES = {"copy_tb_s": 4.3, "bf16_tflops": 790.0, "fp8_tflops": 1500.0, "float32_tflops": 790.0}


class NoHash:
    """Engram rows that nobody looks up."""

    def rows(self, history: torch.Tensor) -> list[torch.Tensor]:
        return [history, history]


def costs_of(
    model: ModelConfig, requests: list[tuple[int, int]], world_size: int, engine: EngineConfig, pairs: float = 1.0
) -> tuple[Step, StepCosts]:
    """The costs of a step for requests of some context and new tokens.

    Args:
        model: the model.
        requests: tokens in the cache and new ones, of each.
        world_size: ranks, all with as many rows.
        engine: precision and replay.
        pairs: of the experts that a rank has on average.
    """
    text = model.text_config
    setup = Setup.of(model, engine, adjust=lambda problem: of_rank(problem, world_size))
    pages = -(-max(sum(lengths) for lengths in requests) // engine.cache.page_tokens)
    scheduled = [
        ScheduledRequest(
            Request(i, [0] * (old + new), old + new, old + new, "last", old, i, list(range(pages))), num_new_tokens=new
        )
        for i, (old, new) in enumerate(requests)
    ]
    parts = make_parts(scheduled, text, engine.replay)
    step = build_step(parts, text, NoHash(), engine.cache.page_tokens, torch.device("cpu"))  # type: ignore[arg-type]
    experts = {}
    for layer in text.layers:
        rows = (step.source if layer.is_candidate_source else step.rows_entering(layer)).num_tokens * world_size
        local, pairs_here = text.n_routed_experts // world_size, rows * text.num_experts_per_tok // world_size
        experts[layer.layer_id] = ExpertRows(rows, int(rows * pairs), pairs_here, local)
    return step, StepCosts(text, setup.plan, step, experts, num_logits=len(requests))


@pytest.mark.parametrize(
    ("replay", "activations", "wanted", "others"),
    [
        # Sums of section 7, without and with what it leaves out: combine, activations around products that memory
        # binds, and wo_a, whose inputs are never quantised.
        ("bounded", "none", 112.0, 5.0),
        ("bounded", "released", 73.0, 9.0),
        ("full", "none", 193.6 + 7.8, 6.5),
        ("full", "released", 118.5 + 7.8, 13.0),
    ],
)
def test_the_floors_of_the_fixed_benchmark_are_those_of_the_specification(
    replay: str, activations: str, wanted: float, others: float
) -> None:
    engine = EngineConfig.from_dict(
        {"device": "cpu", "dtype": "bfloat16", "replay": replay, "activation_quantization": activations}
    )
    model = ModelConfig.from_file(DATA / "config.full.json")
    _, costs = costs_of(model, [(126976, 4096)], 4, engine, pairs=0.82)
    floors = costs.floors(SPEC_RATES)
    total = sum(floors.values()) - floors[Stage.FP4_DECODING]
    assert wanted < total < wanted + others


def test_products_are_counted_like_by_hand() -> None:
    model = ModelConfig.from_file(DATA / "config.tiny.json")
    engine = EngineConfig(device="cpu", dtype="float32")
    _, costs = costs_of(model, [(70, 6), (0, 9)], 2, engine)
    counted: dict[str, int] = defaultdict(int)
    for stage, cost in costs.all():
        counted[str(stage)] += cost.total_flops
    c, rows = model.text_config, 15
    by_hand: dict[str, int] = defaultdict(int)
    for layer in c.layers:
        by_hand[Stage.PROJECTIONS] += _projections_by_hand(c, layer, [(70, 6), (0, 9)])
        by_hand[Stage.GATE] += sum(2 * c.hidden_size for _ in range(rows) for _ in range(c.n_routed_experts))
        by_hand[Stage.SHARED_EXPERT] += rows * 3 * 2 * c.hidden_size * c.moe_intermediate_size
        pairs = 2 * rows * c.num_experts_per_tok // 2
        by_hand[Stage.GROUPED_GEMM] += sum(3 * 2 * c.hidden_size * c.moe_intermediate_size for _ in range(pairs))
        keys = scores = 0
        for old, new in ((70, 6), (0, 9)):
            for position in range(old, old + new):
                keys += min(position + 1, c.sliding_window)
                if layer.compress_ratio:
                    visible = (position + 1) // layer.compress_ratio
                    keys += min(visible, c.index_topk)
                    pool = c.candidate_topk_blocks * c.candidate_block_size
                    scores += min(visible, pool) if layer.uses_candidates else visible
        by_hand[Stage.ATTENTION] += 4 * c.num_attention_heads * c.head_dim * keys
        if layer.is_index_source:  # a product for each head, and its weighted sum
            by_hand[Stage.INDEXER] += 2 * scores * c.index_n_heads * (c.index_head_dim + 1)
        if layer.engram_index is not None:
            columns = c.engram_columns * c.engram_head_dim
            by_hand[Stage.ENGRAM] += 2 * rows * columns * (c.hc_mult + 1) * c.hidden_size
    by_hand[Stage.HEAD] = 2 * 2 * c.hidden_size * c.vocab_size
    for stage, number in by_hand.items():
        assert counted[str(stage)] == number, stage


def _projections_by_hand(c, layer: LayerSchedule, requests: list[tuple[int, int]]) -> int:  # type: ignore[no-untyped-def]
    """Every weight that a row, or an entry, meets: two operations."""
    heads = c.num_attention_heads * c.head_dim
    weights = c.hidden_size * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * heads
    group = heads // c.o_groups
    weights += c.o_groups * group * c.o_lora_rank + c.o_groups * c.o_lora_rank * c.hidden_size
    total = 0
    for old, new in requests:
        if layer.is_index_source:
            total += 2 * new * (c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.hidden_size * c.index_n_heads)
        if layer.is_kv_source:
            total += 2 * new * c.hidden_size * c.head_dim * min(layer.compress_ratio, 2)
            entries = (old + new) // layer.compress_ratio - old // layer.compress_ratio
            total += 2 * entries * c.head_dim * c.index_head_dim
        total += 2 * new * weights
    return total


def test_bytes_are_those_of_operands_and_results() -> None:
    """Dense stages of one window layer and one Engram layer, operand by operand."""
    model = ModelConfig.from_file(DATA / "config.tiny.json")
    step, costs = costs_of(model, [(70, 6), (0, 9)], 2, EngineConfig(device="cpu", dtype="bfloat16"))
    c, rows = model.text_config, 15
    layer = next(layer for layer in c.layers if layer.compress_ratio == 0)
    heads, low = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    products = [  # inputs, weight, outputs
        ((rows, c.hidden_size), (c.q_lora_rank, c.hidden_size), (rows, c.q_lora_rank)),
        ((rows, c.q_lora_rank), (heads, c.q_lora_rank), (rows, heads)),
        ((rows, c.hidden_size), (c.head_dim, c.hidden_size), (rows, c.head_dim)),
        ((rows, heads), (c.o_groups, c.o_lora_rank, heads // c.o_groups), (rows, low)),
        ((rows, low), (c.hidden_size, low), (rows, c.hidden_size)),
    ]
    moved = sum(torch.empty(shape, dtype=torch.bfloat16).nbytes for product in products for shape in product)
    assert costs._projections(layer, step.encoder, step.encoder).num_bytes == moved
    width = c.engram_columns * c.engram_head_dim
    outputs = (c.hc_mult + 1) * c.hidden_size
    tables = torch.empty(rows, width, dtype=torch.uint8).nbytes + torch.empty(rows, width // 32).byte().nbytes
    dense = [(rows, width), (outputs, width), (rows, outputs), *[(rows, c.hc_mult, c.hidden_size)] * 2]
    assert costs._engram(rows).num_bytes == tables + sum(
        torch.empty(shape, dtype=torch.bfloat16).nbytes for shape in dense
    )
    head = [(2, c.hidden_size), (c.vocab_size, c.hidden_size)]
    logits = torch.empty(2, c.vocab_size).nbytes
    assert costs._head().num_bytes == logits + sum(torch.empty(shape, dtype=torch.bfloat16).nbytes for shape in head)


def test_experts_are_counted_where_they_are() -> None:
    ids = torch.tensor([[0, 5], [4, 5], [0, 1], [-1, -1]], dtype=torch.int32)
    assert ExpertRows.of(ids, range(4, 8)) == ExpertRows(rows=4, rows_read=2, pairs=3, experts=2)


def test_bytes_of_decode_are_weights_and_caches() -> None:
    """One row of one request: nearly all is read once."""
    model = ModelConfig.from_file(DATA / "config.full.json")
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    context = 131072
    _, costs = costs_of(model, [(context, 1)], 1, engine)
    c = model.text_config
    heads = c.num_attention_heads * c.head_dim
    dense = c.hidden_size * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * heads + heads * c.o_lora_rank
    dense += c.o_groups * c.o_lora_rank * c.hidden_size + 3 * c.hidden_size * c.moe_intermediate_size
    experts = c.n_routed_experts * 3 * c.hidden_size * c.moe_intermediate_size * 17 // 32
    layer = 2 * dense + experts + 2 * c.n_routed_experts * c.hidden_size
    keys = sum(
        min(context // s.compress_ratio, c.candidate_topk_blocks * c.candidate_block_size)
        if s.uses_candidates
        else context // s.compress_ratio
        for s in c.layers
        if s.is_index_source
    )
    wanted = len(c.layers) * layer + 2 * keys * c.index_head_dim + 2 * c.vocab_size * c.hidden_size
    assert costs.num_bytes == pytest.approx(wanted, rel=0.02)
