"""Files of a checkpoint: the index, and safetensors headers with the byte range of every tensor. Needs no torch.

The header is parsed here because memory-mapped tables need offsets, and because every fault must name tensor and file.
The rules are those of the safetensors format: an 8-byte little-endian header length, a JSON object, then the tensors'
bytes without gaps or overlaps.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minideepinfer.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
_BITS = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64"), 64),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a shard's header describes it.

    Attributes:
        name: as in the header.
        dtype: safetensors dtype.
        shape: as stored.
        file: the shard.
        offset: first byte in the file.
        nbytes: length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} in {self.file.name}"


@dataclass(frozen=True)
class Index:
    """`model.safetensors.index.json`: the file of every tensor, and the bytes of all of them."""

    weight_map: dict[str, str]
    total_size: int


def read_index(directory: Path) -> Index:
    """Read and check the index of a checkpoint.

    Raises:
        CheckpointError: there is none, it is no JSON object with `metadata.total_size` and `weight_map`, a key is
            given twice, or a file name is not a plain name (a path could lead outside the checkpoint).
    """
    file = directory / INDEX_NAME
    try:
        text = file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror or error}); a checkpoint needs it, also one of a single shard"
        ) from None
    data = _json_object(text, str(file))
    metadata, weight_map = data.get("metadata"), data.get("weight_map")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(total_size, int) or isinstance(total_size, bool):
        raise CheckpointError(f"{file}: metadata.total_size is {total_size!r}; the bytes of all tensors are needed")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map is missing or empty; an object of tensor name to shard is needed")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or shard == "..":
            raise CheckpointError(
                f"{file}: tensor {name} is said to be in {shard!r}; the name of a file beside the index is needed"
            )
    return Index(weight_map, total_size)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a shard, and no tensor data.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file; names the file, and the tensor if
            it is one tensor's entry that is wrong.
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file}: has {size} bytes and announces a header of {length}; it is truncated or not a "
                    "safetensors file"
                )
            header = _json_object(stream.read(length), f"{file}: header")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error})") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ of the header is {metadata!r:.80}; an object of strings is needed")
    tensors = {name: _entry(name, entry, file, 8 + length) for name, entry in header.items()}
    _check_tiling(tensors, file, 8 + length, size)
    return tensors


def _json_object(text: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{where}: has the key {twice!r} twice; each may stand once")
        return result

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: holds a {type(data).__name__}; a JSON object is needed")
    return data


def _entry(name: str, entry: Any, file: Path, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{name} in {file}: the header holds {entry!r:.120}; dtype, shape and data_offsets are needed"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{name} in {file}: dtype {dtype!r} is unknown; known are {', '.join(sorted(_BITS))}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{name} in {file}: shape {shape!r:.80} and data_offsets {offsets!r:.80}; lists of whole numbers are needed"
        )
    nbytes = math.prod(shape) * _BITS[dtype] // 8
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{name} in {file}: data_offsets {offsets} hold {offsets[1] - offsets[0]} bytes, but {dtype} {shape} "
            f"needs {nbytes}"
        )
    return StoredTensor(name, dtype, tuple(shape), file, data_start + offsets[0], nbytes)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_tiling(tensors: dict[str, StoredTensor], file: Path, data_start: int, size: int) -> None:
    end, before = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(
                f"{tensor.name} in {file}: begins at byte {tensor.offset} and {fault} {before}, which ends at {end}"
            )
        end, before = end + tensor.nbytes, tensor.name
    if end != size:
        fault = "is truncated" if end > size else "has bytes that belong to no tensor"
        raise CheckpointError(f"{file}: {fault}: its tensors end (with {before}) at byte {end}, the file at {size}")
