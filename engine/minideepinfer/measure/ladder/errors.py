"""How far a rung is from the first one, module by module, on what the first one computed.

Logits of a random model are chaotic: one rounding moves a selection, and everything behind it. So each module gets the
first rung's own inputs, with its selection, candidates and routing, in the fixed benchmark's step; choices are compared
as sets. Modules are those of one layer of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from minideepinfer.config import LayerSchedule
from minideepinfer.measure.ladder.reference import KeptOnDevice, Reference, last_row, pools_of
from minideepinfer.measure.prefill import PrefillBench
from minideepinfer.model.block import Block, HandOver
from minideepinfer.model.rows import Rows
from minideepinfer.model.stand_in import around
from minideepinfer.model.step import Step
from minideepinfer.operators import Selection

MODULES = {
    "block": "what a block adds to the streams",
    "attention": "output of an attention layer, projections included",
    "entries": "global entries, index keys and window entries",
    "experts": "output of the MoE sublayer",
    "mixing": "inputs of both sublayers, streams and mix behind them",
    "Engram": "what Engram adds to the streams",
    "head": "logits of the last row",
    "selection": "share of the entries of the first rung that are not selected",
    "candidates": "the same of candidate blocks",
    "routing": "the same of experts",
}
"""Names in `Record.errors`, and what is compared: norm of the difference over the norm, or a share."""


@torch.inference_mode()
def module_errors(subject: PrefillBench, reference: Reference) -> dict[str, float]:
    """Errors of the subject's modules: of each of `MODULES` at its worst layer, then `layers.L.MODULE`.

    In bounded replay the layers behind the source of candidates run, and are compared, on the rows that are kept.
    """
    found: dict[str, float] = {}
    for layer in reference.layers:
        if layer.layer_id < len(subject.model.blocks):
            errors = _LayerErrors(subject, reference, layer)
            found |= {f"layers.{layer.layer_id}.{module}": error for module, error in errors.all()}
    worst: dict[str, float] = {}
    for name, error in found.items():
        module = name.rpartition(".")[2]
        worst[module] = largest([worst.get(module, 0.0), error])
    if len(subject.model.blocks) == reference.num_layers:
        worst["head"] = _head_error(subject, reference)
    return {module: worst[module] for module in MODULES if module in worst} | found


def largest(errors: Iterable[float]) -> float:
    """The largest error; NaN if one is."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def relative_error(own: Tensor, reference: Tensor) -> float:
    """`|own - reference| / |reference|` over all elements; inf where the reference alone is all zero."""
    own, reference = own.double(), reference.double()
    error, size = (own - reference).norm(), reference.norm()
    return float(torch.where(error == 0, 0.0, error / size))


def missing_share(own: Tensor, reference: Tensor) -> float:
    """Share of the reference's numbers, row by row, that are not in own: integer `[T, K]`, -1 is nobody's."""
    ordered = own.sort(dim=1).values
    places = torch.searchsorted(ordered, reference.contiguous()).clamp(max=ordered.shape[1] - 1)
    named = reference >= 0
    missing = named & (ordered.gather(1, places) != reference)
    return float(missing.sum() / named.sum().clamp(min=1))


class _LayerErrors:
    """The modules of one layer, each on the first rung's inputs, caches and choices."""

    def __init__(self, subject: PrefillBench, reference: Reference, layer: LayerSchedule) -> None:
        self._subject, self._reference, self._layer = subject, reference, layer
        self._block: Block = subject.model.blocks[layer.layer_id]
        narrowing, everything = subject.new_step().narrowing, slice(None)
        kept: slice | Tensor = everything if narrowing is None else narrowing.kept
        self._entering = kept if layer.behind_candidate_source else everything
        self._running = kept if layer.behind_candidate_source or layer.is_candidate_source else everything

    def all(self) -> Iterator[tuple[str, float]]:
        """Module and error."""
        for measure in (self._whole_block, self._attention, self._mixing, self._experts):
            yield from measure()

    def _whole_block(self) -> Iterator[tuple[str, float]]:
        streams, pre = self._before()
        own = self._run(
            ("streams_out", "engram.streams_out"), lambda step: self._block.forward(HandOver(streams, pre), step)
        )
        start = self._before_all()[0][self._running]
        yield "block", relative_error(own["streams_out"] - start, self._value("streams_out")[self._running] - start)
        if "engram.streams_out" in own:
            added = self._value("engram.streams_out")[self._entering] - streams
            yield "Engram", relative_error(own["engram.streams_out"] - streams, added)

    def _attention(self) -> Iterator[tuple[str, float]]:
        x, attention = self._value("attn.in"), self._block.attention

        def call(step: Step) -> None:
            if self._layer.is_candidate_source and step.narrowing is not None:
                attention.write_window(x[step.narrowing.dropped], step.narrowing.dropped_rows)
            attention.forward(x[self._running], self._rows(step), step)  # reads the first rung's entries
            attention.publish(x[self._entering], step.rows_entering(self._layer), step)

        entries = ("attn.window_kv", "attn.compressed_kv", "index.keys")
        own = self._run(("attn.out", "index.topk", "index.candidates", *entries), call)
        yield "attention", relative_error(own["attn.out"], self._value("attn.out")[self._running])
        references = {name: self._value(name) for name in entries if name in own}
        references["attn.window_kv"] = references["attn.window_kv"][self._running]
        yield "entries", largest(relative_error(own[name], value) for name, value in references.items())
        for module, name in (("selection", "index.topk"), ("candidates", "index.candidates")):
            if name in own:
                yield module, missing_share(own[name], self._value(name)[self._running])

    def _mixing(self) -> Iterator[tuple[str, float]]:
        streams, pre = self._before()
        injected = self._reference.of(self._layer.layer_id, "engram.streams_out")
        streams = streams if injected is None else injected[self._entering]
        block = replace(self._block, weights=replace(self._block.weights, engram=None))
        block = around(block, self._value("attn.out")[self._running], self._value("ffn.out")[self._running])
        names = ("attn.in", "ffn.in", "streams_out", "next_pre_mix")
        own = self._run(names, lambda step: block.forward(HandOver(streams, pre), step))
        rows = {name: self._entering if name == "attn.in" else self._running for name in names}
        yield "mixing", largest(relative_error(own[name], self._value(name)[rows[name]]) for name in names)

    def _experts(self) -> Iterator[tuple[str, float]]:
        x = self._value("ffn.in")[self._running]
        own = self._run(("ffn.out", "ffn.expert_ids"), lambda step: self._block.experts(x, self._rows(step), step))
        yield "experts", relative_error(own["ffn.out"], self._value("ffn.out")[self._running])
        yield "routing", missing_share(own["ffn.expert_ids"], self._value("ffn.expert_ids")[self._running])

    def _run(self, names: Iterable[str], call: Callable[[Step], object]) -> dict[str, Tensor]:
        """What a call records of this layer."""
        subject, prefix = self._subject, f"{self._block.name}."
        subject.rewind()
        for pool, kept in zip(pools_of(subject.cache), self._reference.pools, strict=True):
            pool.copy_(kept)
        subject.before_layer(self._layer.layer_id)
        step = subject.new_step()
        recorder = KeptOnDevice(prefix + name for name in names)
        step.recorder = recorder
        self._force(step)
        call(step)
        return {name.removeprefix(prefix): value for name, value in recorder.values.items()}

    def _force(self, step: Step) -> None:
        layer, rows = self._layer, self._rows(step)
        if layer.index_source is not None:
            indices = self._value("index.topk", layer.index_source)[self._running]
            step.selection = [Selection(part.contiguous()) for part in rows.split(indices)]
            step.forced.selection[layer.layer_id] = step.selection
        if layer.uses_candidates:
            source = self._block.config.candidate_source_layer_id
            step.candidates = list(rows.split(self._value("index.candidates", source)[self._running].contiguous()))
        ids, weights = self._value("ffn.expert_ids"), self._value("ffn.expert_weights")
        step.forced.routing[layer.layer_id] = (ids[self._running], weights[self._running])

    def _rows(self, step: Step) -> Rows:
        """The rows that run the layer's sublayers."""
        return step.source if self._layer.is_candidate_source else step.rows_entering(self._layer)

    def _value(self, name: str, layer_id: int | None = None) -> Tensor:
        found = self._reference.of(self._layer.layer_id if layer_id is None else layer_id, name)
        assert found is not None, name
        return found

    def _before(self) -> tuple[Tensor, Tensor]:
        streams, pre = self._before_all()
        return streams[self._entering], pre[self._entering]

    def _before_all(self) -> tuple[Tensor, Tensor]:
        """Streams and mix that enter the layer, of all rows of the step."""
        before = self._layer.layer_id - 1
        if before < 0:
            return self._subject.model.embed(self._subject.new_step().token_ids)
        return self._value("streams_out", before), self._value("next_pre_mix", before)


def _head_error(subject: PrefillBench, reference: Reference) -> float:
    model, last = subject.model, reference.num_layers - 1
    streams, pre = (reference.of(last, name) for name in ("streams_out", "next_pre_mix"))
    assert streams is not None and pre is not None
    step = subject.new_step()
    hidden = model.mixing.collapse(streams[-1:], pre[-1:], step.decoder.phase)
    return relative_error(model.logits(hidden, step, last_row(hidden)), reference.values["logits"])
