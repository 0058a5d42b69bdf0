"""Every module on golden inputs, with the golden selection, candidates and routing forced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from minideepinfer.config import LayerSchedule
from minideepinfer.model.block import Block, HandOver
from minideepinfer.model.stand_in import around
from minideepinfer.model.step import Forced, Step
from minideepinfer.operators import Phase
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.golden_compare import Comparison
from minideepinfer.testing.golden_runs import Span, candidate_blocks, make_spans, padded_selection, probe_step
from minideepinfer.testing.golden_set import GoldenRun

_NEEDS = {
    "hc_attn.pre": (),
    "hc_attn.post": (),
    "hc_attn.comb": (),
    "attn.in": (),
    "hc_ffn.pre": ("attn.out",),
    "hc_ffn.post": ("attn.out",),
    "hc_ffn.comb": ("attn.out",),
    "ffn.in": ("attn.out",),
    "next_pre_mix": ("attn.out",),
    "streams_out": ("attn.out", "ffn.out"),
}
"""What mixing yields, and the sublayer outputs it is computed from."""


class ModulePass:
    """Compares the modules of a model with one golden run. A module whose inputs the file lacks is left out."""

    def __init__(self, runner: Runner, golden: GoldenRun, comparison: Comparison) -> None:
        self.runner = runner
        self.golden = golden
        self.comparison = comparison
        self.dtype = runner.model.dtype
        self._index_keys: dict[int, Tensor] = {}  # by KV source whose entries lie in the cache
        self.spans = make_spans(runner, golden.sequence.token_ids, golden.probes)
        self.probe_spans = [(span, probe_step(runner, span)) for span in self.spans if len(span.probes)]

    @torch.inference_mode()
    def run(self) -> None:
        """Run all modules, layer by layer."""
        self._embedding()
        for block in self.runner.model.blocks:
            self._engram(block)
            self._attention(block)
            self._mixing(block)
            self._experts(block)
        self._head()

    def _value(self, tensor: Tensor) -> Tensor:
        """A golden activation on the compute device, in the compute dtype."""
        return tensor.to(self.runner.device, self.dtype)

    def _captured(
        self, patterns: tuple[str, ...], call: Callable[[Span, Step], object], probes: bool
    ) -> dict[str, Tensor]:
        """What a call records, over all spans (or the probe rows of all spans)."""
        capture = Capture(patterns)
        for span, step in self.probe_spans if probes else [(span, span.step) for span in self.spans]:
            capture.begin_step([0])
            step.recorder, step.forced = capture, Forced()
            call(span, step)
        return capture.of(0)

    def _embedding(self) -> None:
        ids = torch.tensor(self.golden.sequence.token_ids, device=self.runner.device)
        streams, _ = self.runner.model.embed(ids)
        self.comparison.values("embed", "embed", streams[:, 0].cpu())

    def _entering(self, block: Block) -> tuple[Tensor, Tensor] | None:
        """Golden streams and `pre` that enter a block, at the probe positions."""
        layer_id = block.layer.layer_id
        if layer_id == 0:
            embedded, hc_mult = self.golden.probed("embed"), block.config.hc_mult
            if embedded is None:
                return None
            return embedded.unsqueeze(1).repeat(1, hc_mult, 1), torch.eye(hc_mult)[:1].repeat(len(embedded), 1)
        streams = self.golden.probed(f"layers.{layer_id - 1}.streams_out")
        pre = self.golden.probed(f"layers.{layer_id - 1}.next_pre_mix")
        return None if streams is None or pre is None else (streams, pre)

    def _engram(self, block: Block) -> None:
        if block.weights.engram is None:
            return
        rows = torch.cat([span.step.engram_rows_of(block.layer) for span in self.spans])
        self.comparison.hash_rows(f"{block.name}.engram.hash_ids", rows.cpu())
        entering = self._entering(block)
        if entering is None:
            return
        streams = self._value(entering[0])

        def call(span: Span, step: Step) -> None:
            block.add_engram(streams[span.probe_rows], step.encoder, step)

        name = f"{block.name}.engram.streams_out"
        own = self._captured((name,), call, probes=True)[name]
        self.comparison.increment(name, own, streams.cpu(), entering[0])

    def _attention(self, block: Block) -> None:
        layer, name = block.layer, block.name
        x = self.golden.whole(f"{name}.attn.in")
        selected = None if layer.index_source is None else self.golden.whole(f"layers.{layer.index_source}.index.topk")
        if x is None or (layer.index_source is not None and selected is None):
            return
        if layer.kv_source not in (None, layer.layer_id, *self._index_keys):
            return
        x = self._value(x)
        config, device = self.runner.config.text_config, self.runner.device
        candidates = candidate_blocks(self._golden_candidates(), len(x), config, device)

        def call(span: Span, step: Step) -> None:
            if selected is not None:
                step.selection = [padded_selection(selected[span.tokens], config, device)]
                step.candidates = [candidates[span.tokens]]
                step.forced.selection[layer.layer_id] = step.selection
            block.attention.publish(x[span.tokens], step.encoder, step)
            block.attention.forward(x[span.tokens], step.encoder, step)

        own = self._captured((f"{name}.attn.*", f"{name}.index.*"), call, probes=False)
        self.comparison.values("attention", f"{name}.attn.out", own[f"{name}.attn.out"])
        self.comparison.codes("window kv", f"{name}.attn.window_kv", own[f"{name}.attn.window_kv"])
        if layer.is_kv_source:
            self.comparison.codes("global kv", f"{name}.attn.compressed_kv", own[f"{name}.attn.compressed_kv"])
            self._index_keys[layer.layer_id] = own[f"{name}.index.keys"]
            self._restore_entries(layer, own)
        if layer.is_index_source and layer.kv_source is not None:
            self.comparison.codes("index keys", f"{name}.index.keys", self._index_keys[layer.kv_source])
            self._choices(block, own)

    def _choices(self, block: Block, own: dict[str, Tensor]) -> None:
        """Free selection and candidates."""
        layer, name = block.layer, block.name
        if not layer.uses_candidates or self._golden_candidates() is not None:
            self.comparison.selection(f"{name}.index.topk", own[f"{name}.index.topk"], layer)
        if layer.is_candidate_source:
            self.comparison.candidates(f"{name}.index.candidates", own[f"{name}.index.candidates"], layer)

    def _restore_entries(self, layer: LayerSchedule, own: dict[str, Tensor]) -> None:
        """Put the golden entries where the layers that reuse them will look."""
        names = (f"layers.{layer.layer_id}.attn.compressed_kv", f"layers.{layer.layer_id}.index.keys")
        main, keys = (self._value(own[n] if (golden := self.golden.get(n)) is None else golden) for n in names)
        begin = 0
        for span in self.spans:
            entries = span.step.encoder.entries(layer.compress_ratio, self.runner.cache.pair_slots)
            part = slice(begin, begin + len(entries.rows))
            self.runner.cache.write_entries(layer.layer_id, main[part], keys[part], entries)
            begin = part.stop

    def _golden_candidates(self) -> Tensor | None:
        return self.golden.whole(f"layers.{self.runner.config.text_config.candidate_source_layer_id}.index.candidates")

    def _mixing(self, block: Block) -> None:
        """Coefficients, collapse and norm of both sites, and the mix behind them, around golden sublayer outputs."""
        entering = self._entering(block)
        if entering is None:
            return
        streams, pre, weights = entering[0], entering[1].to(self.runner.device), block.weights
        injected = self.golden.probed(f"{block.name}.engram.streams_out")
        if injected is not None:
            streams, weights = injected, replace(weights, engram=None)
        streams = self._value(streams)
        outputs = {name: self.golden.probed(f"{block.name}.{name}") for name in ("attn.out", "ffn.out")}
        # A missing output is replaced by zeros; what depends on it is not compared.
        attention, moe = (self._value(torch.zeros_like(streams[:, 0]) if o is None else o) for o in outputs.values())

        def call(span: Span, step: Step) -> None:
            rows = span.probe_rows
            mixing = around(replace(block, weights=weights), attention[rows], moe[rows])
            mixing.forward(HandOver(streams[rows], pre[rows]), step)

        own = self._captured(tuple(f"{block.name}.{name}" for name in _NEEDS), call, probes=True)
        for name, needs in _NEEDS.items():
            if all(outputs[need] is not None for need in needs):
                self.comparison.values("mhc", f"{block.name}.{name}", own[f"{block.name}.{name}"])

    def _experts(self, block: Block) -> None:
        name = f"{block.name}.ffn"
        x, ids, scores = (self.golden.probed(f"{name}.{part}") for part in ("in", "expert_ids", "expert_weights"))
        if x is None or ids is None or scores is None:
            return
        x, routing = self._value(x), (ids.to(self.runner.device), scores.to(self.runner.device))

        def call(span: Span, step: Step) -> None:
            rows = span.probe_rows
            step.forced.routing[block.layer.layer_id] = (routing[0][rows], routing[1][rows])
            block.experts(x[rows], step.encoder, step)

        own = self._captured((f"{name}.*",), call, probes=True)
        self.comparison.values("experts", f"{name}.out", own[f"{name}.out"])
        self.comparison.routing(name, own[f"{name}.expert_ids"], own[f"{name}.expert_weights"])

    def _head(self) -> None:
        model = self.runner.model
        last = f"layers.{len(model.blocks) - 1}"
        streams, pre = self.golden.probed(f"{last}.streams_out"), self.golden.probed(f"{last}.next_pre_mix")
        if streams is not None and pre is not None:
            collapsed = model.mixing.collapse(self._value(streams), pre.to(self.runner.device), Phase.PREFILL)
            self.comparison.values("norm", "final.collapsed", collapsed.cpu())
            self.comparison.values("norm", "final.normed", model.normalize(collapsed, Phase.PREFILL).cpu())
        normed = self.golden.get("final.normed")
        if normed is not None:
            own = model.head(self._value(normed)).cpu()
            self.comparison.values("head", "logits", own, self.golden.positions("final.normed"))
