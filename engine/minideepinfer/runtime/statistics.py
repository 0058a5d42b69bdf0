"""What an engine has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minideepinfer.cache.prefix_tree import PrefixStatistics
from minideepinfer.config import TextConfig
from minideepinfer.operators import Phase
from minideepinfer.runtime.memory import ForkStatistics
from minideepinfer.runtime.runner import StepShare


@dataclass
class Throughput:
    """Rows of all ranks and seconds, by phase; a step with any prefill row counts as prefill."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, phase: Phase, tokens: int, seconds: float) -> None:
        """Count a step."""
        if phase == Phase.PREFILL:
            self.prefill_tokens += tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += tokens
            self.decode_seconds += seconds


@dataclass(frozen=True)
class CacheStatistics:
    """The caches of this rank, and what they saved.

    Attributes:
        layout: how entries are stored.
        num_bytes: of all pools.
        bytes_per_token: of global entries and index keys, in all KV sources.
        bytes_per_request: of the window entries and kept halves of pairs of a request, in all layers.
        prefix: totals of the prefix cache; None = it is off.
        forks: totals of requests that went on from others.
    """

    layout: str
    num_bytes: int
    bytes_per_token: float
    bytes_per_request: int
    prefix: PrefixStatistics | None
    forks: ForkStatistics


@dataclass
class WorkCount:
    """Rows that layers were run on, of all ranks.

    In bounded replay rows end at the candidate source: there they only leave their entries, and count as not run.

    Attributes:
        encoder_rows: rows that ran the layers before the candidate source.
        decoder_rows: rows that ran the candidate source and the layers behind it.
        layer_rows: of every layer, the rows it ran, added up.
    """

    encoder_rows: int = 0
    decoder_rows: int = 0
    layer_rows: int = 0

    def add(self, shares: Sequence[StepShare], config: TextConfig) -> None:
        """Count a step of a model."""
        first, last = sum(share.num_tokens for share in shares), sum(share.num_kept for share in shares)
        before = config.candidate_source_layer_id
        self.encoder_rows += first
        self.decoder_rows += last
        self.layer_rows += first * before + last * (config.num_hidden_layers - before)
