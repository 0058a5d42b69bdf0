"""Where the weights of a benchmark's rank come from: random numbers, or its part of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minideepinfer.checkpoint import Checkpoint
from minideepinfer.checkpoint.partition import Partition
from minideepinfer.config import EngramConfig, ModelConfig
from minideepinfer.model.engram_hash import EngramHash
from minideepinfer.model.load import WeightLoader
from minideepinfer.model.weights import ModelWeights
from minideepinfer.operators import MoeWeights
from minideepinfer.runtime.tokenizer import load_tokenizer


class RankWeights(Protocol):
    """Makes the weights of a rank."""

    def make(self) -> ModelWeights:
        """All of them."""
        ...

    def moe(self, layer_id: int) -> MoeWeights:
        """Gate and experts of one layer once more, the same."""
        ...


@dataclass(frozen=True)
class Part(Partition):
    """A rank's place in a world that holds only the first rows of its Engram tables.

    Attributes:
        engram_fraction: share of each rank's rows that is held.
    """

    engram_fraction: float = 1.0

    def rows_per_rank(self, num_rows: int) -> int:
        """Rows of a table on each rank."""
        return max(1, int(num_rows / self.size * self.engram_fraction))


class CheckpointWeights:
    """See `RankWeights`.

    Args:
        path: of the checkpoint.
        part: which of its experts and rows are read.
        num_layers: first layers that are read.
        dtype: of dense matrices.
        device: where they go.
        engram: where tables go.
    """

    def __init__(
        self,
        path: str,
        part: Part,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        engram: EngramConfig,
    ) -> None:
        self._path, self._num_layers = path, num_layers
        self._how = (dtype, device, engram, part)

    def make(self) -> ModelWeights:
        """See `RankWeights`."""
        with Checkpoint.open(self._path) as checkpoint:
            return WeightLoader(checkpoint, *self._how).load(num_layers=self._num_layers)

    def moe(self, layer_id: int) -> MoeWeights:
        """See `RankWeights`."""
        with Checkpoint.open(self._path) as checkpoint:
            return WeightLoader(checkpoint, *self._how).moe(layer_id)


class FoldedHash(EngramHash):
    """An `EngramHash` whose rows are folded into those that the ranks hold."""

    def __init__(self, config: ModelConfig, checkpoint: str | None, device: torch.device, part: Part) -> None:
        """Take the checkpoint's tokenizer, if there is one; see `EngramHash`."""
        tokenizer = None if checkpoint is None else load_tokenizer(_directory(checkpoint), config).backend
        super().__init__(config, tokenizer, device)
        self._held = [part.size * part.rows_per_rank(rows) for rows in config.text_config.engram_num_embeddings]

    def rows(self, history: Tensor) -> list[Tensor]:
        """See `EngramHash.rows`."""
        return [rows % held for rows, held in zip(super().rows(history), self._held, strict=True)]


def _directory(checkpoint: str) -> Path:
    with Checkpoint.open(checkpoint) as opened:
        return opened.path


def checkpoint_config(checkpoint: str) -> ModelConfig:
    """The model that a checkpoint holds."""
    with Checkpoint.open(checkpoint) as opened:
        return opened.config
