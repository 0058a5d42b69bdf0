"""Small checkpoints for tests, and edits of their files that know the safetensors format but not our reader."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minideepinfer.checkpoint.make_tiny import make_tiny

DATA = Path(__file__).parent / "data"
INDEX = "model.safetensors.index.json"


@dataclass
class Entry:
    """One tensor of a shard."""

    dtype: str
    shape: list[int]
    data: bytes


def small_config() -> dict[str, Any]:
    """A config of four layers (window + Engram, ratio 2, ratio 1, reindex) and one draft layer, 250 tensors or so."""
    config = json.loads((DATA / "config.tiny.json").read_text())
    config["image_token_id"] = 94
    config["text_config"] |= {
        "vocab_size": 96,
        "hidden_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "compress_ratios": [0, 2, 1, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
        "engram_layer_ids": [0],
        "engram_num_embeddings": [462],
        "engram_compressed_vocab_size": 64,
        "num_nextn_predict_layers": 1,
        "dspark_noise_token_id": 95,
        "dspark_target_layer_ids": [2, 3],
        "dspark_n_routed_experts": 2,
    }
    return config


def make_small(directory: Path, config: dict[str, Any] | None = None, seed: int = 0) -> Path:
    """Write a checkpoint of `small_config` (or another one) below `directory` and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "source.json"
    file.write_text(json.dumps(config or small_config()))
    make_tiny(directory / "checkpoint", file, seed)
    return directory / "checkpoint"


def edit_json(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file in place."""
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))


def shard_of(directory: Path, name: str) -> Path:
    """The shard that holds a tensor, according to the index."""
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


def read_raw(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a shard."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(file: Path, header: dict[str, Any] | str, data: bytes = b"") -> None:
    """Write a shard from a header, as it is."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_shard(file: Path) -> dict[str, Entry]:
    """All tensors of a shard."""
    header, data = read_raw(file)
    header.pop("__metadata__", None)
    return {n: Entry(e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}


def write_shard(file: Path, entries: dict[str, Entry]) -> None:
    """Write a valid shard."""
    header, data = header_of(entries), b"".join(entry.data for entry in entries.values())
    write_raw(file, header, data)


def header_of(entries: dict[str, Entry]) -> dict[str, Any]:
    """The header of a valid shard."""
    header, end = {}, 0
    for name, entry in entries.items():
        header[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [end, end := end + len(entry.data)],
        }
    return header


def edit_shard(file: Path, edit: Callable[[dict[str, Entry]], Any]) -> None:
    """Change a shard's tensors; the result is a valid shard."""
    entries = read_shard(file)
    edit(entries)
    write_shard(file, entries)


def edit_header(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a shard's header and leave its data alone."""
    header, data = read_raw(file)
    edit(header)
    write_raw(file, header, data)


def fix_total(directory: Path) -> None:
    """Make the index's total_size agree with the shards again."""
    total = sum(len(e.data) for file in directory.glob("*.safetensors") for e in read_shard(file).values())
    edit_json(directory / INDEX, lambda index: index["metadata"].update(total_size=total))


def sparse_shard(file: Path, tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
    """A valid shard of zeros that takes no room on disk: name -> dtype, shape, bytes per element."""
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        offsets = [end, end := end + math.prod(shape) * size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    write_raw(file, header)
    with file.open("r+b") as stream:
        stream.truncate(stream.seek(0, 2) + end)
