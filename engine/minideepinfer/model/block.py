"""One block: Engram, attention site, MoE site, with the hand-off of `pre` between sites (spec 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from minideepinfer.config import LayerSchedule, TextConfig
from minideepinfer.model.attention import AttentionLayer
from minideepinfer.model.engram import engram_values, start_fetch
from minideepinfer.model.epilogue import Epilogue
from minideepinfer.model.hyper_connections import HyperConnections, Site
from minideepinfer.model.rows import Rows
from minideepinfer.model.step import Step
from minideepinfer.model.weights import LayerWeights
from minideepinfer.operators import CommOperator, Entered, MoeOperator, Phase, Stage
from minideepinfer.operators.results import checked


class HandOver(NamedTuple):
    """What a block hands to the next one.

    Attributes:
        streams: `[T, S, H]`.
        pre: float32 `[T, S]`, of the block's last site.
        entered: the next block's attention site, where it follows at once and is entered already.
    """

    streams: Tensor
    pre: Tensor
    entered: Entered | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """A block and the operators that serve it.

    Attributes:
        layer: its role.
        weights: its weights.
        config: the model's facts.
        attention: its attention layer.
        moe: MoE operators by phase, and in `moe_weights` what each made of the weights.
        comm: moves tokens and Engram rows.
        mixing: the residual streams.
        attention_site: where attention takes its input.
        moe_site: where the experts take theirs.
        following: the attention site of the next block; None if Engram, or nothing, lies between.
        epilogue: what follows a dense product.
    """

    layer: LayerSchedule
    weights: LayerWeights
    config: TextConfig
    attention: AttentionLayer
    moe: Mapping[Phase, MoeOperator]
    moe_weights: Mapping[Phase, Any]
    comm: CommOperator
    mixing: HyperConnections
    attention_site: Site
    moe_site: Site
    following: Site | None
    epilogue: Epilogue

    @property
    def name(self) -> str:
        """Prefix of this block's intermediates."""
        return f"layers.{self.layer.layer_id}"

    def forward(self, before: HandOver, step: Step) -> HandOver:
        """Run the block; at the candidate source, on the rows that are kept.

        Args:
            before: what the block before hands over.
            step: the rows, and transient state.

        Returns:
            The same for the next block.
        """
        rows = step.rows_entering(self.layer)
        entered = before.entered or self._enter(before.streams, before.pre, rows, step)
        self.record(step, "attn.in", entered.x, rows)
        self.attention.publish(entered.x, rows, step)
        if self.layer.is_candidate_source:
            rows = step.source
            if step.narrowing is not None:
                self.attention.write_window(entered.x[step.narrowing.dropped], step.narrowing.dropped_rows)
                entered = entered.rows(step.narrowing.kept)
        self._record_site(step, "hc_attn", entered, rows)
        output = self.attention.forward(entered.x, rows, step)
        with step.clock.stage(Stage.MIXING):
            entered = self.mixing.advance(entered, output, self.moe_site, rows.phase)
        self._record_site(step, "hc_ffn", entered, rows)
        self.record(step, "ffn.in", entered.x, rows)
        output = self.experts(entered.x, rows, step)
        with step.clock.stage(Stage.MIXING):
            after = self._leave(entered, output, rows)
        self.record(step, "streams_out", after.streams, rows)
        self.record(step, "next_pre_mix", after.pre, rows)
        return after

    def _enter(self, streams: Tensor, pre: Tensor, rows: Rows, step: Step) -> Entered:
        streams = self.add_engram(streams, rows, step)
        with step.clock.stage(Stage.MIXING):
            return self.mixing.enter(streams, pre, self.attention_site, rows.phase)

    def _leave(self, entered: Entered, output: Tensor, rows: Rows) -> HandOver:
        pre = entered.site.pre
        if self.following is None:
            return HandOver(self.mixing.mix(entered, output, rows.phase), pre)
        following = self.mixing.advance(entered, output, self.following, rows.phase)
        return HandOver(following.streams, pre, following)

    def prepare(self, step: Step) -> None:
        """Do the host's work for this block while the device is busy with the one before; no copy may wait for it."""
        entering = step.rows_entering(self.layer)
        rows = step.source if self.layer.is_candidate_source else entering
        if self.layer.is_kv_source:
            entering.entries(self.layer.compress_ratio, self.attention.cache.pair_slots)
        if self.layer.is_candidate_source and step.narrowing is not None:
            step.narrowing.dropped_rows.ring_places(self.attention.cache.ring_size)
        rows.ring_places(self.attention.cache.ring_size)
        for batch in rows.batches:
            step.prepared(self.attention.attention[batch.phase], batch)
            if self.layer.is_index_source:
                step.prepared(self.attention.indexer[batch.phase], batch)
        step.prepared(self.moe[rows.phase], rows.batches)
        step.exchange(self.comm, self.layer)

    def start(self, step: Step) -> None:
        """Send for Engram rows, where the block has any; before the first block, so that they travel meanwhile."""
        if self.weights.engram is not None:
            with step.clock.stage(Stage.ENGRAM):
                row_ids = step.engram_rows_of(self.layer)
                step.fetched[self.layer.layer_id] = start_fetch(row_ids, self.weights.engram, self.comm)

    def add_engram(self, streams: Tensor, rows: Rows, step: Step) -> Tensor:
        """Inject the Engram term, where the block has one."""
        if self.weights.engram is None:
            return streams
        if self.layer.layer_id not in step.fetched:
            self.start(step)
        with step.clock.stage(Stage.ENGRAM):
            row_ids = step.engram_rows_of(self.layer)
            weights, dtype = self.weights.engram, streams.dtype
            fetched = step.fetched.pop(self.layer.layer_id).wait()
            values = engram_values(row_ids, fetched, weights, dtype, self.epilogue, rows.phase)
            streams = self.epilogue.inject(streams, values, weights.gate_weight, rows.phase)
        self.record(step, "engram.hash_ids", row_ids, rows)
        self.record(step, "engram.streams_out", streams, rows)
        return streams

    def experts(self, x: Tensor, rows: Rows, step: Step) -> Tensor:
        """The MoE sublayer on `[T, H]`."""
        operator, weights = self.moe[rows.phase], self.moe_weights[rows.phase]
        routing = step.forced.routing.get(self.layer.layer_id)
        if step.recorder.wants(f"{self.name}.ffn.expert_ids") or step.recorder.wants(f"{self.name}.ffn.expert_weights"):
            ids, scores = operator.route(x, weights)
            self.record(step, "ffn.expert_ids", ids, rows)
            self.record(step, "ffn.expert_weights", scores, rows)
            routing = routing or (ids, scores)
        with step.clock.stage(Stage.GROUPED_GEMM):
            metadata = step.prepared(operator, rows.batches)
            exchange = step.exchange(self.comm, self.layer)
            output = operator.run(x, weights, exchange, metadata, routing)
        output = checked(output, x.shape, x.dtype, x.device, f"the moe operator of {self.name} ({rows.phase})")
        self.record(step, "ffn.out", output, rows)
        return output

    def record(self, step: Step, name: str, value: Tensor, rows: Rows) -> None:
        """Offer an intermediate to the step's recorder."""
        if step.recorder.wants(f"{self.name}.{name}"):
            step.recorder.record(f"{self.name}.{name}", value, rows.request_ids)

    def _record_site(self, step: Step, name: str, entered: Entered, rows: Rows) -> None:
        for part in ("pre", "post", "comb"):
            self.record(step, f"{name}.{part}", getattr(entered.site, part), rows)
