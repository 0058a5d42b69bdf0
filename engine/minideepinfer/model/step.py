"""One step of the engine: which tokens run, through which layers, and what is remembered while they do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from minideepinfer.config import LayerSchedule
from minideepinfer.model.rows import Rows
from minideepinfer.operators import Batch, CommOperator, NoClock, Pending, Selection, StageClock, TokenExchange
from minideepinfer.operators.placed import placed_like, unplaced


class Recorder(Protocol):
    """Collects named intermediates, e.g. for a comparison with a golden set."""

    def wants(self, name: str) -> bool:
        """Whether anybody asked for this name; what nobody wants is not computed."""
        ...

    def record(self, name: str, value: Tensor, request_ids: Tensor) -> None:
        """Keep a value.

        Args:
            name: e.g. `layers.3.attn.out`.
            value: `[N, ...]`.
            request_ids: int64 `[N]`, the request of the step that each row or entry belongs to.
        """
        ...


class NoRecorder:
    """A `Recorder` that wants nothing."""

    def wants(self, name: str) -> bool:
        """False."""
        return False

    def record(self, name: str, value: Tensor, request_ids: Tensor) -> None:
        """Never called."""


@dataclass
class Forced:
    """Discrete choices imposed on a step, by layer; used to compare modules on golden inputs.

    Attributes:
        selection: replaces what the layer's indexer chose, one per batch.
        candidates: replaces the candidate blocks, one int32 `[T, candidate_topk_blocks]` per batch.
        routing: replaces what the gate chose.
    """

    selection: dict[int, list[Selection]] = field(default_factory=dict)
    candidates: dict[int, list[Tensor]] = field(default_factory=dict)
    routing: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Narrowing:
    """Which rows go on behind the candidate source in bounded replay (spec 4.2).

    Attributes:
        kept: int64, rows that go on.
        dropped: int64, rows that end here, always the first ones of their request.
        dropped_rows: the same rows, described.
    """

    kept: Tensor
    dropped: Tensor
    dropped_rows: Rows


@dataclass
class Step:
    """The rows of one forward pass, and its transient state.

    `encoder` rows run the layers before the candidate source. Of them, those that `narrowing` keeps run the rest;
    `source` and `decoder` describe these same rows for the candidate source and for the layers behind it, which differ
    in the window entries that exist (architecture section 6). In full replay all three are one object.

    Attributes:
        token_ids: int64 `[T]`.
        engram_rows: per Engram layer int64 `[T, columns]`, table rows of each token.
        encoder: rows of the layers before the candidate source.
        source: rows of the candidate source.
        decoder: rows of the layers behind it.
        narrowing: which rows of `encoder` go on; None = all.
        selection: latest selection, one per batch; overwritten by each index source.
        candidates: latest candidate blocks, one per batch.
        counts: number of rows of every rank that enter the first layer, and that run the last one; None = one rank.
        fetched: Engram rows on their way, by layer.
    """

    token_ids: Tensor
    engram_rows: list[Tensor]
    encoder: Rows
    source: Rows
    decoder: Rows
    narrowing: Narrowing | None = None
    recorder: Recorder = field(default_factory=NoRecorder)
    clock: StageClock = field(default_factory=NoClock)
    forced: Forced = field(default_factory=Forced)
    selection: list[Selection] = field(default_factory=list)
    candidates: list[Tensor] = field(default_factory=list)
    counts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    fetched: dict[int, Pending[tuple[Tensor, ...]]] = field(default_factory=dict)
    _prepared: dict[tuple[int, int], Any] = field(default_factory=dict)

    def rows_entering(self, layer: LayerSchedule) -> Rows:
        """The rows that enter a layer; at the candidate source, before rows are dropped."""
        return self.decoder if layer.behind_candidate_source else self.encoder

    def meet(self, comm: CommOperator) -> None:
        """Learn how many rows every rank has, unless it is known already; the host waits for it."""
        if comm.world_size > 1 and self.counts is None:
            own = torch.tensor([[self.encoder.num_tokens, self.decoder.num_tokens]], device=self.token_ids.device)
            first, last = zip(*comm.all_gather(own, [1] * comm.world_size).tolist(), strict=True)
            self.counts = first, last

    def rows_anywhere(self, layer: LayerSchedule) -> bool:
        """Whether a row of any rank enters a layer."""
        counts = self.counts or ((self.encoder.num_tokens,), (self.decoder.num_tokens,))
        return any(counts[layer.behind_candidate_source])

    def exchange(self, comm: CommOperator, layer: LayerSchedule) -> TokenExchange:
        """What brings the tokens of a layer to their experts; prepared at first use and shared by layers."""
        narrowed = layer.behind_candidate_source or layer.is_candidate_source
        key = (id(unplaced(comm)), int(narrowed))
        if key not in self._prepared:
            own = self.decoder if narrowed else self.encoder
            counts = self.counts[narrowed] if self.counts else (own.num_tokens,)
            self._prepared[key] = placed_like(comm, comm.prepare(counts))
        prepared: TokenExchange = self._prepared[key]
        return prepared

    def engram_rows_of(self, layer: LayerSchedule) -> Tensor:
        """Table rows of the tokens that enter an Engram layer, int64 `[T, columns]`."""
        assert layer.engram_index is not None
        rows = self.engram_rows[layer.engram_index]
        return rows[self.narrowing.kept] if self.narrowing and layer.behind_candidate_source else rows

    def prepared(self, operator: Any, batch: Batch | tuple[Batch, ...]) -> Any:
        """An operator's metadata for a batch, prepared at first use and shared by all layers."""
        key = (id(unplaced(operator)), id(batch))
        if key not in self._prepared:
            self._prepared[key] = operator.prepare(batch)
        return self._prepared[key]
