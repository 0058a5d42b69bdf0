"""One attention layer: projections, window and global entries, selection, output (spec 3.4 to 3.8)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.config import LayerSchedule, TextConfig
from minideepinfer.errors import OperatorError
from minideepinfer.model.compressor import Compressor
from minideepinfer.model.epilogue import Epilogue
from minideepinfer.model.rope import Angles, RotaryTable
from minideepinfer.model.rows import Rows
from minideepinfer.model.step import Step
from minideepinfer.model.weights import AttentionWeights
from minideepinfer.operators import AttentionOperator, Batch, IndexerOperator, IndexerOutput, Phase, Selection, Stage
from minideepinfer.operators.results import checked


class AttentionLayer:
    """CSA2 of one block: Full, Reindex, Reuse or window only, as the schedule says."""

    def __init__(
        self,
        layer: LayerSchedule,
        weights: AttentionWeights,
        config: TextConfig,
        cache: KVCache,
        attention: Mapping[Phase, AttentionOperator],
        indexer: Mapping[Phase, IndexerOperator],
        epilogue: Epilogue,
        rope: RotaryTable,
    ) -> None:
        self.layer = layer
        self.weights = weights
        self.config = config
        self.cache = cache
        self.attention = attention
        self.indexer = indexer
        self.epilogue = epilogue
        self.rope = rope
        self.compressor = Compressor(layer, weights.compressor, rope, epilogue) if weights.compressor else None
        self.name = f"layers.{layer.layer_id}"

    def window_entries(self, activation: Tensor, rows: Rows) -> Tensor:
        """This step's window entries `[T, head_dim]`, as the cache holds them."""
        kv = F.linear(activation, self.weights.wkv)
        norm, angles = self.weights.kv_norm, rows.angles(self.rope)
        kv = self.epilogue.run(kv, rows.phase, norm=norm, angles=angles, quantization=self.epilogue.kv("fp8"))
        return self.cache.layout.window.stored(kv)

    def publish(self, x: Tensor, rows: Rows, step: Step) -> None:
        """Store the global entries and index keys of these rows; nothing on layers that own none."""
        if self.compressor is None:
            return
        with step.clock.stage(Stage.PROJECTIONS):
            main, keys, entries = self.compressor.publish(x, rows, self.cache)
        self._record(step, "attn.compressed_kv", main, entries.request_ids)
        self._record(step, "index.keys", keys, entries.request_ids)

    def write_window(self, x: Tensor, rows: Rows) -> None:
        """Compute and store the window entries of rows that do not run this layer."""
        activation = self.epilogue.activation(x, rows.phase, in_place=False)
        self.cache.write_window(self.layer.layer_id, self.window_entries(activation, rows), rows)

    def forward(self, x: Tensor, rows: Rows, step: Step) -> Tensor:
        """Attend; global entries of these rows must have been published.

        Args:
            x: `[T, H]`, the normalised input.
            rows: the rows.
            step: carries selection and candidates from layer to layer.

        Returns:
            `[T, H]`.
        """
        weights, epilogue, phase = self.weights, self.epilogue, rows.phase
        with step.clock.stage(Stage.PROJECTIONS):
            angles = rows.angles(self.rope)
            activation = epilogue.activation(x, phase, in_place=False)
            qr = F.linear(activation, weights.wq_a)
            qr = epilogue.run(qr, phase, norm=weights.q_norm, quantization=epilogue.activations)
            q = F.linear(qr, weights.wq_b).unflatten(-1, (-1, self.config.head_dim))
            q = epilogue.run(q, phase, angles=angles)
            window = self.window_entries(activation, rows)
        self._record(step, "attn.window_kv", window, rows.request_ids)
        if self.layer.is_index_source:
            self._select(x, qr, rows, step)
        with step.clock.stage(Stage.ATTENTION):
            heads = self._attend(q, window, angles, rows, step)
        with step.clock.stage(Stage.KEY_GATHER):
            self.cache.write_window(self.layer.layer_id, window, rows)
        with step.clock.stage(Stage.PROJECTIONS):
            output = self._project(heads, phase)
        self._record(step, "attn.out", output, rows.request_ids)
        return output

    def _attend(self, q: Tensor, window: Tensor, angles: Angles, rows: Rows, step: Step) -> Tensor:
        source = self.layer.kv_source
        outputs = []
        for index, (batch, *parts) in enumerate(
            zip(rows.batches, *(rows.split(t) for t in (q, window, *angles)), strict=True)
        ):
            operator = self.attention[batch.phase]
            heads = operator.run(
                q=parts[0],
                window_new=parts[1],
                window_ring=self.cache.window[self.layer.layer_id],
                global_kv=None if source is None else self.cache.main[source],
                selection=None if source is None else step.selection[index],
                sink=self.weights.sink,
                cos=parts[2],
                sin=parts[3],
                scale=self.config.head_dim**-0.5,
                metadata=step.prepared(operator, batch),
            )
            who = f"the attention operator of {self.name} ({batch.phase})"
            outputs.append(checked(heads, parts[0].shape, q.dtype, q.device, who))
        return outputs[0] if len(outputs) == 1 else torch.cat([q[:0], *outputs])

    def _select(self, x: Tensor, qr: Tensor, rows: Rows, step: Step) -> None:
        """Run the indexer and leave its selection (and candidates) in the step."""
        weights, config = self.weights.indexer, self.config
        assert weights is not None and self.layer.kv_source is not None
        with step.clock.stage(Stage.PROJECTIONS):
            q = F.linear(qr, weights.wq_b).unflatten(-1, (-1, config.index_head_dim))
            angles, quantization = rows.angles(self.rope), self.epilogue.kv("mxfp4")
            q = self.epilogue.run(q, rows.phase, angles=angles, quantization=quantization)
            head_weights = F.linear(x, weights.weights_proj) * (config.index_head_dim * config.index_n_heads) ** -0.5
        self._record(step, "index.query", q, rows.request_ids)
        self._record(step, "index.head_weights", head_weights, rows.request_ids)
        with step.clock.stage(Stage.INDEXER):
            outputs = []
            for index, (batch, q_part, w_part) in enumerate(
                zip(rows.batches, rows.split(q), rows.split(head_weights), strict=True)
            ):
                operator = self.indexer[batch.phase]
                candidates = step.candidates[index] if self.layer.uses_candidates else None
                keys = self.cache.index_keys[self.layer.kv_source]
                output = operator.run(q_part, w_part, keys, candidates, step.prepared(operator, batch))
                outputs.append(self._checked(output, batch))
        step.selection = [output.selection for output in outputs]
        known = [selection.indices for selection in step.selection if isinstance(selection, Selection)]
        self._record_all(step, "index.topk", known, rows)
        step.selection = step.forced.selection.get(self.layer.layer_id, step.selection)
        if self.layer.is_candidate_source:
            step.candidates = [output.candidates for output in outputs if output.candidates is not None]
            self._record_all(step, "index.candidates", step.candidates, rows)
            step.candidates = step.forced.candidates.get(self.layer.layer_id, step.candidates)

    def _checked(self, output: IndexerOutput, batch: Batch) -> IndexerOutput:
        """The indexer's output, if its shapes are those of the contract; other layouts than ours are not known here."""
        who = f"the indexer of {self.name} ({batch.phase})"
        if not isinstance(output, IndexerOutput):
            raise OperatorError(f"{who} returned {type(output).__name__}; an IndexerOutput is needed")
        if isinstance(output.selection, Selection):
            checked(
                output.selection.indices,
                (batch.num_tokens, self.config.index_topk),
                torch.int32,
                batch.positions.device,
                who,
            )
        if self.layer.is_candidate_source:
            checked(
                output.candidates,
                (batch.num_tokens, self.config.candidate_topk_blocks),
                torch.int32,
                batch.positions.device,
                who,
            )
        return output

    def _project(self, heads: Tensor, phase: Phase) -> Tensor:
        """Grouped output projection (spec 3.8); `wo_a` never has quantised inputs."""
        groups = heads.unflatten(1, (self.config.o_groups, -1)).flatten(2)
        low = heads.new_empty(*groups.shape[:2], self.config.o_lora_rank)
        torch.bmm(
            groups.transpose(0, 1), self.weights.wo_a.mT, out=low.transpose(0, 1)
        )  # writes rows where they belong
        return F.linear(self.epilogue.activation(low.flatten(1), phase), self.weights.wo_b)

    def _record(self, step: Step, name: str, value: Tensor, request_ids: Tensor) -> None:
        if step.recorder.wants(f"{self.name}.{name}"):
            step.recorder.record(f"{self.name}.{name}", value, request_ids)

    def _record_all(self, step: Step, name: str, parts: list[Tensor], rows: Rows) -> None:
        if parts and step.recorder.wants(f"{self.name}.{name}"):
            self._record(step, name, torch.cat(parts), rows.request_ids)
