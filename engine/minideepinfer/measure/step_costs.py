"""What the stages of a step cost at least: formulas of the model and of the rows that run, whatever the operators.

Operators' stages are those of `minideepinfer.measure.costs`; the dense stages around them are here, counted alike:
two operations for a multiply-add of a product, every operand read once, every result written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minideepinfer.cache.kv_cache import pair_slots
from minideepinfer.config import LayerSchedule, TextConfig
from minideepinfer.measure.costs import ELEMENT_BYTES, FLOAT32, arithmetic
from minideepinfer.measure.costs.attention import DistinctKeys, attention_cost
from minideepinfer.measure.costs.indexer import indexer_cost
from minideepinfer.measure.costs.moe import experts_cost, gate_cost
from minideepinfer.measure.costs.residual import residual_cost
from minideepinfer.measure.floor import floor_ms
from minideepinfer.model.rows import Rows
from minideepinfer.model.step import Step
from minideepinfer.operators import Batch, Phase, Stage
from minideepinfer.operators.cost import Cost
from minideepinfer.operators.plan import Plan

StageCost = tuple[Stage, Cost]


@dataclass(frozen=True)
class ExpertRows:
    """What the experts of this rank have to do in one layer.

    Attributes:
        rows: rows of all ranks.
        rows_read: of them, with an expert here.
        pairs: pairs of a row and an expert here.
        experts: experts here that have a row.
    """

    rows: int
    rows_read: int
    pairs: int
    experts: int

    @classmethod
    def of(cls, topk_ids: Tensor, local: range) -> ExpertRows:
        """Count the rows of a layer; `topk_ids` is int32 `[T', k]`, `local` the experts here."""
        ids = topk_ids.cpu()
        here = (ids >= local.start) & (ids < local.stop)
        return cls(len(ids), int(here.any(1).sum()), int(here.sum()), len(ids[here].unique()))


class StepCosts:
    """The costs of one step of a model's first layers.

    Args:
        config: the model's facts.
        plan: for the problems that operators serve.
        step: the rows.
        experts: of each layer that runs.
        num_logits: rows whose logits are wanted.
    """

    def __init__(
        self, config: TextConfig, plan: Plan, step: Step, experts: Mapping[int, ExpertRows], num_logits: int
    ) -> None:
        self.config, self.plan, self.step = config, plan, step
        self.experts, self.num_logits = experts, num_logits
        problem: Any = plan.operators["residual", None, Phase.PREFILL].problem
        self._size, self._arithmetic = ELEMENT_BYTES[problem.dtype], arithmetic(problem)
        self._quantized = "fp8" if problem.activation_quantization == "released" else self._arithmetic

    def floors(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Least milliseconds of each stage: the sum of those of its layers."""
        least: dict[str, float] = {}
        for stage, cost in self.all():
            least[str(stage)] = least.get(str(stage), 0.0) + floor_ms(cost, rates)
        return least

    @property
    def num_bytes(self) -> int:
        """Bytes of all stages; experts are decoded where they are multiplied."""
        return sum(cost.num_bytes for stage, cost in self.all() if stage is not Stage.FP4_DECODING)

    def all(self) -> Iterator[StageCost]:
        """Stage by stage, layer by layer."""
        yield Stage.HEAD, self._embedding(self.step.encoder.num_tokens)
        for layer in self.config.layers[: len(self.experts)]:
            yield from self._layer(layer)
        yield Stage.HEAD, self._head()

    def _layer(self, layer: LayerSchedule) -> Iterator[StageCost]:
        entering = self.step.rows_entering(layer)
        rows = self.step.source if layer.is_candidate_source else entering
        if layer.engram_index is not None:
            yield Stage.ENGRAM, self._engram(entering.num_tokens)
        yield Stage.PROJECTIONS, self._projections(layer, rows, entering)
        for batch in rows.batches:
            if layer.is_index_source:
                yield Stage.INDEXER, self._indexer(layer, batch)
            yield Stage.ATTENTION, self._attention(layer, batch)
        yield from self._moe(layer, rows)
        residual: Any = self.plan.operators["residual", None, rows.phase].problem
        for _ in ("attention", "experts"):
            yield Stage.MIXING, residual_cost(residual, "advance", rows.num_tokens)

    def _product(self, rows: int, columns: int, outputs: int, kind: str = "") -> Cost:
        """`rows` by a weight `[outputs, columns]`."""
        moved = rows * (columns + outputs) + columns * outputs
        return Cost({kind or self._arithmetic: 2 * rows * columns * outputs}, moved * self._size)

    def _projections(self, layer: LayerSchedule, rows: Rows, entering: Rows) -> Cost:
        c, kind, tokens = self.config, self._quantized, rows.num_tokens
        heads, low = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
        cost = (
            self._product(tokens, c.hidden_size, c.q_lora_rank, kind)
            + self._product(tokens, c.q_lora_rank, heads, kind)
            + self._product(entering.num_tokens, c.hidden_size, c.head_dim, kind)
            + self._product(tokens, low, c.hidden_size, kind)
            + Cost({self._arithmetic: 2 * tokens * heads * c.o_lora_rank}, 0)  # each group of heads by its own matrix
            + Cost({}, (tokens * (heads + low) + heads * c.o_lora_rank) * self._size)
        )
        if layer.is_kv_source:
            parts = 2 if layer.compress_ratio > 1 else 1
            entries = len(entering.entries(layer.compress_ratio, pair_slots(c)).rows)
            cost += self._product(entering.num_tokens, c.hidden_size, parts * c.head_dim)
            cost += self._product(entries, c.head_dim, c.index_head_dim)
        if layer.is_index_source:
            cost += self._product(tokens, c.q_lora_rank, c.index_n_heads * c.index_head_dim, kind)
            cost += self._product(tokens, c.hidden_size, c.index_n_heads)
        return cost

    def _attention(self, layer: LayerSchedule, batch: Batch) -> Cost:
        problem: Any = self.plan.operators["attention", layer.layer_id, batch.phase].problem
        positions, window = batch.positions.cpu(), self.config.sliding_window
        oldest = batch.window_start.cpu()[batch.request_ids.cpu()]
        keys = (positions - oldest + 1).clamp(0, window)
        older = sum(
            min(window - 1, start) for start, length in zip(batch.context_lens, batch.seqlens, strict=True) if length
        )
        selected = 0
        if layer.compress_ratio:
            keys = keys + batch.visible_entries(layer.compress_ratio).cpu().clamp(max=self.config.index_topk)
            selected = _distinct(batch, layer.compress_ratio, self.config.index_topk)
        distinct = DistinctKeys(batch.num_tokens, older, selected)
        return attention_cost(problem, batch.num_tokens, int(keys.sum()), distinct)

    def _indexer(self, layer: LayerSchedule, batch: Batch) -> Cost:
        problem: Any = self.plan.operators["indexer", layer.layer_id, batch.phase].problem
        c, visible = self.config, batch.visible_entries(layer.compress_ratio).cpu()
        pool = c.candidate_topk_blocks * c.candidate_block_size
        if layer.uses_candidates:
            visible = visible.clamp(max=pool)
        distinct = _distinct(batch, layer.compress_ratio, pool if layer.uses_candidates else None)
        return indexer_cost(problem, batch.num_tokens, int(visible.sum()), distinct)

    def _moe(self, layer: LayerSchedule, rows: Rows) -> Iterator[StageCost]:
        problem: Any = self.plan.operators["moe", layer.layer_id, rows.phase].problem
        tokens, c, found = rows.num_tokens, self.config, self.experts[layer.layer_id]
        hidden, inner = c.hidden_size, c.moe_intermediate_size
        yield Stage.GATE, gate_cost(problem, tokens)
        grouped = experts_cost(problem, found.rows, found.rows_read, found.pairs, found.experts)
        # The kit's experts write one sum of a token; here each pair is written, and `combine` adds them up.
        pairs = found.pairs * hidden * self._size
        yield Stage.GROUPED_GEMM, grouped + Cost({}, pairs - found.rows * hidden * self._size)
        yield Stage.COMBINE, Cost({}, pairs + found.rows * hidden * FLOAT32)
        weights = 3 * hidden * inner
        decoded = found.experts * weights
        yield Stage.FP4_DECODING, Cost({}, decoded // 2 + decoded // 32 + decoded * self._size)
        if c.n_shared_experts:
            flops, moved = 2 * tokens * weights, (weights + 2 * tokens * hidden) * self._size
            yield Stage.SHARED_EXPERT, Cost({self._quantized: flops}, moved)

    def _engram(self, tokens: int) -> Cost:
        c = self.config
        memory = c.engram_columns * c.engram_head_dim
        rows = tokens * (memory + memory // 32)
        product = self._product(tokens, memory, (c.hc_mult + 1) * c.hidden_size, self._quantized)
        return product + Cost({}, rows + 2 * tokens * c.hc_mult * c.hidden_size * self._size)

    def _embedding(self, tokens: int) -> Cost:
        return Cost({}, tokens * (1 + self.config.hc_mult) * self.config.hidden_size * self._size)

    def _head(self) -> Cost:
        logits = self.num_logits * self.config.vocab_size
        product = self._product(self.num_logits, self.config.hidden_size, self.config.vocab_size)
        return product + Cost({}, logits * (FLOAT32 - self._size))


def _distinct(batch: Batch, ratio: int, per_row: int | None) -> int:
    """Entries that a batch reads, if each of its rows reads `per_row` others as far as there are any; None = all."""
    total = 0
    for start, length in zip(batch.context_lens, batch.seqlens, strict=True):
        visible = (start + length) // ratio if length else 0
        total += visible if per_row is None else min(visible, length * per_row)
    return total
