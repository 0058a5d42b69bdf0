"""What a rank reads of a checkpoint, and holds then: its own experts and rows only, as `checkpoint size` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer import ConfigError, EngineConfig
from minideepinfer.checkpoint import Checkpoint
from minideepinfer.checkpoint.make_tiny import make_tiny
from minideepinfer.checkpoint.partition import Partition
from minideepinfer.checkpoint.shards import StoredTensor
from minideepinfer.checkpoint.size import memory_summaries, rank_summaries
from minideepinfer.config import EngramConfig
from minideepinfer.model.load import WeightLoader
from torch import Tensor

RANKS = 4


@pytest.fixture(scope="module", params=["tiny", "made"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    if request.param == "tiny":
        return "tiny"
    directory = tmp_path_factory.mktemp("made") / "checkpoint"
    make_tiny(directory)
    return directory


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor below a tree of dataclasses and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def allocated(weights: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(weights)}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_reads_and_holds_what_size_says(path: Path | str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, set[int]] = {}
    fill = Checkpoint._fill

    def noting(self: Checkpoint, stored: StoredTensor, start: int, piece: Tensor) -> None:
        fill(self, stored, start, piece)
        seen.append((stored.name, start, len(piece)))

    monkeypatch.setattr(Checkpoint, "_fill", noting)
    for rank in range(RANKS):
        seen: list[tuple[str, int, int]] = []
        with Checkpoint.open(path) as checkpoint:
            part = Partition(rank, RANKS)
            loader = WeightLoader(checkpoint, getattr(torch, dtype), torch.device("cpu"), EngramConfig(), part)
            weights = loader.load()
            assert checkpoint.bytes_read == sum(length for *_, length in seen)
            assert checkpoint.bytes_read == rank_summaries(checkpoint.config, RANKS)[rank].total.bytes
            predicted = memory_summaries(checkpoint.config, RANKS, dtype)[rank].total.bytes
        assert allocated(weights) == predicted, "not within 2 %, but to the byte"
        for name, start, length in seen:
            if ".ffn.experts." in name:
                assert int(name.split(".")[4]) in part.experts(checkpoint.config.text_config.n_routed_experts), name
            if ".engram.embed." in name:
                byte_range = set(range(start, start + length))
                assert not byte_range & read.setdefault(name, set()), f"{name} was read by two ranks"
                read[name] |= byte_range
    with Checkpoint.open(path) as checkpoint:
        for name, seen_bytes in read.items():
            assert len(seen_bytes) == checkpoint._find(name).nbytes, f"{name} was not read whole"


@given(rows=st.integers(0, 50), size=st.integers(1, 9))
def test_rows_are_shared_out_without_gap_or_overlap(rows: int, size: int) -> None:
    parts = [Partition(rank, size).rows(rows) for rank in range(size)]
    assert [row for part in parts for row in part] == list(range(rows))
    each = Partition(0, size).rows_per_rank(rows)
    assert all(row // each == rank for rank, part in enumerate(parts) for row in part)


def test_experts_that_do_not_divide_are_refused_with_what_would_fit() -> None:
    assert [Partition(rank, 4).experts(8) for rank in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    with pytest.raises(ConfigError, match=r"8 routed experts cannot be .* among 3 ranks; what would fit: 1, 2, 4, 8"):
        Partition(0, 3).experts(8)


@pytest.mark.parametrize(
    ("given_", "ranks"), [({}, 1), ({"expert": 4}, 4), ({"data": 2}, 2), ({"expert": 4, "data": 4}, 4)]
)
def test_both_counts_are_of_the_same_ranks(given_: dict[str, int], ranks: int) -> None:
    parallel = EngineConfig(parallel=given_).parallel
    assert (parallel.expert, parallel.data) == (ranks, ranks)
    assert EngineConfig(**EngineConfig(parallel=given_).model_dump()).parallel == parallel


def test_another_layout_is_refused_with_what_would_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"expert is 4 and data is 2.*\{expert: 2, data: 2\} or \{expert: 4, data: 4\}"
    ):
        EngineConfig(parallel={"expert": 4, "data": 2})
    for wrong in ({"expert": 0}, {"timeout_seconds": 0}, {"experts": 2}):
        with pytest.raises(ConfigError, match="parallel"):
            EngineConfig(parallel=wrong)
