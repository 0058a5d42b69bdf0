"""Compare a checkpoint directory with the layout that its config asks for, without reading tensor data or torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from minideepinfer.checkpoint.layout import KINDS, SKIPPED_KINDS, TensorSpec, expected_tensors, is_vision, scale_shape
from minideepinfer.checkpoint.shards import INDEX_NAME, Index, StoredTensor, read_header, read_index
from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError

MAX_FAULTS = 5
"""Faults that one error spells out; the rest are counted."""


@dataclass(frozen=True)
class Total:
    """A number of tensors and their bytes on disk."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """What a checkpoint holds.

    Attributes:
        kinds: totals of each kind that occurs, in the order of `KINDS`.
    """

    kinds: dict[str, Total]

    @property
    def total(self) -> Total:
        """Everything."""
        return _sum(self.kinds.values())

    @property
    def skipped(self) -> Total:
        """Draft and vision: known, and not read by the text model."""
        return _sum(total for kind, total in self.kinds.items() if kind in SKIPPED_KINDS)


@dataclass(frozen=True)
class Inventory:
    """A directory that was found to be of the released layout.

    Attributes:
        path: the directory.
        config: its `config.json`.
        tensors: where every tensor lies, vision included.
        summary: totals per kind.
    """

    path: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]
    summary: Summary


def directory_of(path: str | Path) -> Path:
    """`"tiny"` is the trained checkpoint inside this package (a directory of that name is `"./tiny"`)."""
    return Path(str(files("minideepinfer"))) / "data" / "tiny" if path == "tiny" else Path(path)


def verify(path: str | Path) -> Inventory:
    """Check config, index and shard headers against each other and against the layout.

    Args:
        path: see `directory_of`.

    Raises:
        ConfigError: `config.json` has an unknown, missing or impossible key.
        CheckpointError: a file is missing, damaged or contradicts another, or a tensor is missing, unknown, stored
            twice, or of another shape or dtype than the config asks for; names tensor, file, found and expected.
    """
    path = directory_of(path)
    config = ModelConfig.from_file(path)
    index = read_index(path)
    stored = _read_headers(path, index)
    specs = expected_tensors(config)
    _refuse(path, _index_faults(index, stored))
    _refuse(path, _name_faults(specs, stored))
    _refuse(path, (fault for spec in specs.values() for fault in _tensor_faults(spec, stored, specs)))
    total = sum(tensor.nbytes for tensor in stored.values())
    if total != index.total_size:
        raise CheckpointError(
            f"{path / INDEX_NAME}: metadata.total_size is {index.total_size}, but the shards hold {total} bytes of "
            "tensors"
        )
    return Inventory(path, config, stored, summarize({n: s.kind for n, s in specs.items()}, stored))


def summarize(kinds: dict[str, str], tensors: dict[str, StoredTensor] | dict[str, TensorSpec]) -> Summary:
    """Totals per kind; a tensor that `kinds` lacks is a vision tensor."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        kind = kinds.get(name, "vision")
        counts[kind] += 1
        sizes[kind] += tensor.nbytes
    return Summary({kind: Total(counts[kind], sizes[kind]) for kind in KINDS if counts[kind]})


def _read_headers(path: Path, index: Index) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    shards = sorted(set(index.weight_map.values()))
    for shard in shards:
        if not os.path.isfile(path / shard):  # Path.is_file raises for names that are too long
            names = [name for name, place in index.weight_map.items() if place == shard]
            raise CheckpointError(
                f"{path / INDEX_NAME}: {names[0]} and {len(names) - 1} more tensors are said to be in {shard!r}, but "
                "there is no such file beside the index"
            )
        for name, tensor in read_header(path / shard).items():
            if name in stored:
                raise CheckpointError(f"{path}: {name} is stored twice, in {stored[name].file.name} and in {shard}")
            stored[name] = tensor
    for file in sorted(path.glob("model-*-of-*.safetensors")):
        if file.name not in shards:
            raise CheckpointError(f"{file}: the index names no tensor in this shard; it belongs to another checkpoint")
    return stored


def _index_faults(index: Index, stored: dict[str, StoredTensor]) -> Iterator[str]:
    for name, shard in index.weight_map.items():
        if name not in stored:
            yield f"{name} is not in {shard}, where the index says it is, nor in another shard"
        elif stored[name].file.name != shard:
            yield f"{name} is not in {shard}, where the index says it is, but in {stored[name].file.name}"
    for name, tensor in stored.items():
        if name not in index.weight_map:
            yield f"{tensor} is not in the index"


def _name_faults(specs: dict[str, TensorSpec], stored: dict[str, StoredTensor]) -> Iterator[str]:
    for name, spec in specs.items():
        if name not in stored:
            yield f"{name} is missing from index and shards; config.json asks for {spec.dtype} {list(spec.shape)}"
    for name, tensor in stored.items():
        if name not in specs and not is_vision(name):
            yield (
                f"{tensor} ({tensor.dtype} {list(tensor.shape)}) is unknown: this config has no use for it, and it is "
                "not one of vision.*, aligner.*, image_*"
            )


def _tensor_faults(spec: TensorSpec, stored: dict[str, StoredTensor], specs: dict[str, TensorSpec]) -> Iterator[str]:
    tensor = stored[spec.name]
    if tensor.dtype != spec.dtype:
        yield f"{tensor} has dtype {tensor.dtype}, expected is {spec.dtype} {list(spec.shape)}"
    elif tensor.shape != spec.shape:
        expected = f"{spec.dtype} {list(spec.shape)}{_block(spec, tensor, specs)}"
        yield f"{tensor} has shape {list(tensor.shape)}, expected is {expected}"


def _block(spec: TensorSpec, tensor: StoredTensor, specs: dict[str, TensorSpec]) -> str:
    """For a scale of the wrong shape: the block that was expected, and the one that the stored shape looks like."""
    if spec.block is None:
        return ""
    weight = specs[spec.name.removesuffix(".scale") + ".weight"]
    rows, columns = weight.shape[0], weight.shape[1] * (2 if weight.dtype == "I8" else 1)
    note = f" (weight of {rows} x {columns} in blocks of {spec.block[0]} x {spec.block[1]}"
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        return note + ")"
    stored_rows, stored_columns = scale_shape(rows, columns, (tensor.shape[0], tensor.shape[1]))
    return f"{note}; the stored scales look like blocks of {stored_rows} x {stored_columns})"


def _refuse(path: Path, faults: Iterator[str]) -> None:
    found = list(faults)
    if found:
        more = f"; and {len(found) - MAX_FAULTS} more" if len(found) > MAX_FAULTS else ""
        raise CheckpointError(f"{path}: " + "; ".join(found[:MAX_FAULTS]) + more)


def _sum(totals: Iterable[Total]) -> Total:
    tensors, sizes = zip((0, 0), *((total.tensors, total.bytes) for total in totals), strict=True)
    return Total(sum(tensors), sum(sizes))
