"""One block: Engram, attention site, MoE site, with the hand-off of `pre` between sites (spec 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minideepinfer.config import LayerSchedule, TextConfig
from minideepinfer.model.attention import AttentionLayer
from minideepinfer.model.engram import engram_values, inject
from minideepinfer.model.hyper_connections import Coefficients, coefficients, collapse, mix
from minideepinfer.model.linear import rms_norm
from minideepinfer.model.rows import Rows
from minideepinfer.model.step import Step
from minideepinfer.model.weights import LayerWeights
from minideepinfer.operators import CommOperator, MoeOperator, Phase
from minideepinfer.operators.results import checked


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
        activation_quantization: `released` or `none`.
    """

    layer: LayerSchedule
    weights: LayerWeights
    config: TextConfig
    attention: AttentionLayer
    moe: Mapping[Phase, MoeOperator]
    moe_weights: Mapping[Phase, Any]
    comm: CommOperator
    activation_quantization: str

    @property
    def name(self) -> str:
        """Prefix of this block's intermediates."""
        return f"layers.{self.layer.layer_id}"

    def forward(self, streams: Tensor, pre: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Run the block; at the candidate source, on the rows that are kept.

        Args:
            streams: `[T, S, H]`.
            pre: float32 `[T, S]`, handed over by the previous site.
            step: the rows, and transient state.

        Returns:
            The streams behind the block and the `pre` for the next one.
        """
        rows = step.rows_entering(self.layer)
        streams = self.add_engram(streams, rows, step)
        with step.clock.stage("mhc"):
            x = rms_norm(collapse(streams, pre), self.weights.attn_norm, self.config.rms_norm_eps)
        self.record(step, "attn.in", x, rows)
        self.attention.publish(x, rows, step)
        if self.layer.is_candidate_source:
            rows = step.source
            if step.narrowing is not None:
                self.attention.write_window(x[step.narrowing.dropped], step.narrowing.dropped_rows)
                x, streams = x[step.narrowing.kept], streams[step.narrowing.kept]
        with step.clock.stage("mhc"):
            site = self._site(streams, self.weights.hc_attn, "hc_attn", rows, step)
        output = self.attention.forward(x, rows, step)
        with step.clock.stage("mhc"):
            streams = mix(streams, output, site)
            ffn = self._site(streams, self.weights.hc_ffn, "hc_ffn", rows, step)
            x = rms_norm(collapse(streams, site.pre), self.weights.ffn_norm, self.config.rms_norm_eps)
        self.record(step, "ffn.in", x, rows)
        output = self.experts(x, rows, step)
        with step.clock.stage("mhc"):
            streams = mix(streams, output, ffn)
        self.record(step, "streams_out", streams, rows)
        self.record(step, "next_pre_mix", ffn.pre, rows)
        return streams, ffn.pre

    def add_engram(self, streams: Tensor, rows: Rows, step: Step) -> Tensor:
        """Inject the Engram term, where the block has one."""
        if self.weights.engram is None:
            return streams
        with step.clock.stage("engram"):
            row_ids = step.engram_rows_of(self.layer)
            values = engram_values(row_ids, self.weights.engram, self.comm, streams.dtype, self.activation_quantization)
            streams = inject(streams, values, self.weights.engram, self.config)
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
        with step.clock.stage("experts"):
            metadata = step.prepared(operator, rows.batches)
            output = operator.run(x, weights, self.comm, metadata, routing)
        output = checked(output, x.shape, x.dtype, f"the moe operator of {self.name} ({rows.phase})")
        self.record(step, "ffn.out", output, rows)
        return output

    def record(self, step: Step, name: str, value: Tensor, rows: Rows) -> None:
        """Offer an intermediate to the step's recorder."""
        if step.recorder.wants(f"{self.name}.{name}"):
            step.recorder.record(f"{self.name}.{name}", value, rows.request_ids)

    def _site(self, streams: Tensor, weights: Any, name: str, rows: Rows, step: Step) -> Coefficients:
        site = coefficients(streams, weights, self.config)
        for part in ("pre", "post", "comb"):
            self.record(step, f"{name}.{part}", getattr(site, part), rows)
        return site
