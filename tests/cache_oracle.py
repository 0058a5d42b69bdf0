"""Requests recomputed from scratch: alone, cold, in one prefill with naive operators; memoised by token prefix.

The models are the kit's small one and a sibling of it, five layers of one of each kind: a window layer with Engram, a
ratio-2 source, the candidate source, a layer that searches again and one that reuses a selection, in the encoder in
one model and in the decoder in the other. Windows are narrow, so that a short prompt can have a hit that saves rows.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from engine_fixtures import poison
from minideepinfer.checkpoint.make_tiny import make_tiny
from minideepinfer.config import EngineConfig
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.testing.margins import CHOICES, CLEAR_MARGIN, SCORED, choice_margins
from minideepinfer.testing.models import model_config
from scripted import LONGEST
from torch import Tensor

_COMMON: dict[str, Any] = {"sliding_window": 4, "index_n_heads": 16}
MODELS: dict[str, dict[str, Any]] = {
    "reuse in the encoder": _COMMON,  # the kit's: window, ratio 2, reuse; candidate source, search
    "reuse in the decoder": _COMMON
    | {
        "compress_ratios": [0, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
    },
}
ENTRIES = ("layers.*.attn.compressed_kv", "layers.*.index.keys")


@cache
def checkpoint(name: str) -> Path:
    """The checkpoint of a model, written once for this process."""
    folder = Path(tempfile.mkdtemp(prefix="minideepinfer-machine-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = model_config("small")
    config["text_config"] |= MODELS[name]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    make_tiny(folder / "checkpoint", folder / "config.json")
    return folder / "checkpoint"


def make_runner(name: str, replay: str, kv_quantization: str = "none", **cache: Any) -> Runner:
    """A runner in float32 without quantised activations, with naive operators."""
    config = {
        "dtype": "float32",
        "device": "cpu",
        "kv_quantization": kv_quantization,
        "activation_quantization": "none",
        "replay": replay,
        "max_tokens_per_step": LONGEST,
        "ops": dict.fromkeys(("attention", "indexer", "moe", "residual", "epilogue"), "naive"),
        "cache": cache,
    }
    return Runner(checkpoint(name), EngineConfig(**config), keep_weights=True)


@dataclass(frozen=True, eq=False)
class Computed:
    """What a cold run of T tokens gives.

    Attributes:
        logits: float32 `[T, vocab]`.
        entries: by source layer, main entries and index keys of all T tokens.
        doubtful: bool `[T]`, a choice of this row or of one before it lies within `CLEAR_MARGIN` of a tie.
    """

    logits: Tensor
    entries: dict[int, tuple[Tensor, Tensor]]
    doubtful: Tensor


class Oracle:
    """Recomputes requests of a model; a sequence that begins a known one is known."""

    def __init__(self, name: str) -> None:
        self.runner = make_runner(name, "full", page_tokens=8, num_pages=LONGEST // 8, max_requests=1)
        self.runs = 0
        self._known: dict[tuple[int, ...], Computed] = {}

    def of(self, token_ids: tuple[int, ...]) -> Computed:
        """A cold run that has at least these tokens, and begins with them."""
        if token_ids not in self._known:
            computed = self._compute(token_ids)
            for end in range(1, len(token_ids) + 1):
                self._known[token_ids[:end]] = computed
        return self._known[token_ids]

    def _compute(self, token_ids: tuple[int, ...]) -> Computed:
        poison(self.runner)
        count, text = len(token_ids), self.runner.config.text_config
        request = Request(0, list(token_ids), count, count, "all", ring=0, pages=list(range(LONGEST // 8)))
        capture = Capture((*CHOICES, *SCORED, *ENTRIES))
        (result,) = self.runner.execute([ScheduledRequest(request, count)], capture)
        captured = capture.of(0)
        margins = choice_margins(captured, text, self.runner.model.weights.layers)
        doubtful = torch.stack([margin < CLEAR_MARGIN for margin in margins.values()]).any(0)
        sources = [layer.layer_id for layer in text.layers if layer.is_kv_source]
        entries = {
            source: tuple(captured[f"layers.{source}.{name}"] for name in ("attn.compressed_kv", "index.keys"))
            for source in sources
        }
        self.runs += 1
        return Computed(result.logits, entries, doubtful.cumsum(0) > 0)  # type: ignore[arg-type]


@cache
def oracle(name: str) -> Oracle:
    """The oracle of a model, one for all machines of this process."""
    return Oracle(name)
