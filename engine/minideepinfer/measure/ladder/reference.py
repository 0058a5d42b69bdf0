"""What the first rung computes in one step, kept on the device for the others to be compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.config import LayerSchedule
from minideepinfer.measure.prefill import PrefillBench

_OF_A_LAYER = (
    "engram.streams_out",
    *("attn.in", "attn.out", "attn.window_kv", "attn.compressed_kv"),
    *("index.keys", "index.topk", "index.candidates"),
    *("ffn.in", "ffn.out", "ffn.expert_ids", "ffn.expert_weights"),
)


class KeptOnDevice:
    """A `Recorder` that keeps what it is told to where it lies."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self.values: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        """Whether it is among the names."""
        return name in self._names

    def record(self, name: str, value: Tensor, request_ids: Tensor) -> None:
        """Keep a copy; the model may go on in the same memory."""
        self.values[name] = value.clone()


@dataclass(frozen=True, eq=False)
class Reference:
    """What the first rung computed in one step.

    Attributes:
        layers: one of each kind, whose modules are compared.
        num_layers: of the model that ran.
        values: intermediates by name, rows of the whole step.
        pools: all entries behind the step, by cache pool.
    """

    layers: tuple[LayerSchedule, ...]
    num_layers: int
    values: dict[str, Tensor]
    pools: tuple[Tensor, ...]

    def of(self, layer_id: int, name: str) -> Tensor | None:
        """An intermediate of a layer; None where it has none."""
        return self.values.get(f"layers.{layer_id}.{name}")


def one_of_each_kind(layers: Iterable[LayerSchedule]) -> tuple[LayerSchedule, ...]:
    """The first layer of each kind.

    A kind is window, full, reindex or reuse; with Engram or not; before, at or behind the source of candidates.
    """
    first: dict[tuple[str, bool, bool, bool], LayerSchedule] = {}
    for layer in layers:
        kind = (layer.kind, layer.engram_index is not None, layer.is_candidate_source, layer.behind_candidate_source)
        first.setdefault(kind, layer)
    return tuple(first.values())


@torch.inference_mode()
def record_reference(subject: PrefillBench) -> Reference:
    """Run the subject's step once, in full replay, and keep what modules will be compared with."""
    model = subject.model
    layers = one_of_each_kind(block.layer for block in model.blocks)
    recorder = KeptOnDevice(_names(layers, len(model.blocks)))
    subject.rewind()
    subject.before_layer(0)
    step = subject.new_step()
    assert step.narrowing is None, "the first rung runs all rows through all layers"
    step.recorder = recorder
    hidden = model.forward(step)
    recorder.values["logits"] = model.logits(hidden, step, last_row(hidden))
    pools = tuple(pool.clone() for pool in pools_of(subject.cache))
    return Reference(layers, len(model.blocks), recorder.values, pools)


def last_row(hidden: Tensor) -> Tensor:
    """The number of the last row, int64 `[1]`."""
    return torch.tensor([len(hidden) - 1], device=hidden.device)


def _names(layers: Iterable[LayerSchedule], num_layers: int) -> Iterator[str]:
    """Intermediates that the modules of these layers need."""
    handed_over = ("streams_out", "next_pre_mix")
    yield from (f"layers.{num_layers - 1}.{name}" for name in handed_over)
    for layer in layers:
        yield from (f"layers.{layer.layer_id - 1}.{name}" for name in handed_over)
        yield from (f"layers.{layer.layer_id}.{name}" for name in (*handed_over, *_OF_A_LAYER))
        yield f"layers.{layer.index_source}.index.topk"


def pools_of(cache: KVCache) -> list[Tensor]:
    """All pools of global entries and index keys."""
    return [*cache.main.values(), *cache.index_keys.values()]
