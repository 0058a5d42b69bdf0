"""Ways to corrupt a valid checkpoint of `checkpoint_files.make_small`, one thing at a time, by a random generator."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_files import (
    INDEX,
    Entry,
    edit_header,
    edit_json,
    edit_shard,
    fix_total,
    header_of,
    read_raw,
    read_shard,
    shard_of,
    write_raw,
)
from minideepinfer.config.model import QuantizationSpec, TextConfig

Corrupt = Callable[[Path, random.Random], object]
REFUSED: dict[str, Corrupt] = {}
"""Kinds that must be refused every time."""
EITHER: dict[str, Corrupt] = {}
"""Kinds that may also be harmless."""


def kind(into: dict[str, Corrupt]) -> Callable[[Corrupt], Corrupt]:
    def register(corrupt: Corrupt) -> Corrupt:
        into[corrupt.__name__.replace("_", " ")] = corrupt
        return corrupt

    return register


def some_shard(directory: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(directory.glob("*.safetensors")))


def some_tensor(directory: Path, rng: random.Random, dtype: str = "", text_only: bool = False) -> tuple[Path, str]:
    candidates = [
        (file, name)
        for file in sorted(directory.glob("*.safetensors"))
        for name, entry in read_shard(file).items()
        if entry.dtype.startswith(dtype) and not (text_only and name.startswith("mtp."))
    ]
    return rng.choice(candidates)


def flip(file: Path, rng: random.Random, begin: int, end: int) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
    file.write_bytes(bytes(data))


def set_byte(entries: dict[str, Entry], name: str, position: int, new: bytes) -> None:
    data = entries[name].data
    entries[name].data = data[:position] + new + data[position + len(new) :]


# Files


@kind(REFUSED)
def shard_truncated(directory: Path, rng: random.Random) -> None:
    file = some_shard(directory, rng)
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(1, len(data))])


@kind(REFUSED)
def shard_empty(directory: Path, rng: random.Random) -> None:
    some_shard(directory, rng).write_bytes(b"")


@kind(REFUSED)
def shard_missing(directory: Path, rng: random.Random) -> None:
    some_shard(directory, rng).unlink()


@kind(REFUSED)
def shard_is_something_else(directory: Path, rng: random.Random) -> None:
    junk = [b"PK\x03\x04" + rng.randbytes(500), b"<html>" * 50, rng.randbytes(2000), bytes(64)]
    some_shard(directory, rng).write_bytes(rng.choice(junk))


@kind(REFUSED)
def shards_swapped(directory: Path, rng: random.Random) -> None:
    one, other = rng.sample(sorted(directory.glob("*.safetensors")), 2)
    spare = directory / "spare"
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


@kind(REFUSED)
def bytes_behind_the_last_tensor(directory: Path, rng: random.Random) -> None:
    with some_shard(directory, rng).open("ab") as stream:
        stream.write(rng.randbytes(rng.randrange(1, 99)))


@kind(REFUSED)
def shard_of_another_checkpoint(directory: Path, rng: random.Random) -> None:
    file = some_shard(directory, rng)
    shutil.copy(file, directory / f"model-000{rng.randrange(20, 99)}-of-00099.safetensors")


# Headers


@kind(REFUSED)
def header_length(directory: Path, rng: random.Random) -> None:
    flip(some_shard(directory, rng), rng, 0, 8)


@kind(EITHER)
def header_bit(directory: Path, rng: random.Random) -> None:
    file = some_shard(directory, rng)
    flip(file, rng, 8, 8 + int.from_bytes(file.read_bytes()[:8], "little"))


@kind(REFUSED)
def dtype_swapped(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)
    swaps = {
        "F8_E4M3": ["I8", "F8_E5M2", "U8", "F8_E8M0"],
        "F8_E8M0": ["U8", "F8_E4M3"],
        "I8": ["U8", "F8_E4M3"],
        "BF16": ["F16", "I16"],
        "F32": ["I32", "U32", "F99", 7],
    }
    edit_header(file, lambda header: header[name].update(dtype=rng.choice(swaps[header[name]["dtype"]])))


@kind(REFUSED)
def shape_changed(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)
    new: list[Callable[[list[int]], list[Any]]] = [
        lambda shape: [*shape, 1],
        lambda shape: [1, *shape],
        lambda shape: [shape[0] * 2, *shape[1:]],
        lambda shape: [-shape[0], *shape[1:]],
        lambda shape: [],
        lambda shape: [float(shape[0]), *shape[1:]],
    ]
    edit_header(file, lambda header: header[name].update(shape=rng.choice(new)(header[name]["shape"])))


@kind(REFUSED)
def shape_transposed(directory: Path, rng: random.Random) -> None:
    while True:
        file, name = some_tensor(directory, rng)
        shape = read_shard(file)[name].shape
        if len(shape) == 2 and shape[0] != shape[1]:
            break
    edit_header(file, lambda header: header[name].update(shape=shape[::-1]))


@kind(REFUSED)
def offsets_overlap(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)

    def edit(header: dict[str, Any]) -> None:
        begin, end = header[name]["data_offsets"]
        shift = rng.choice([-4, 4, 64, -begin or 8])
        header[name]["data_offsets"] = [begin + shift, end + shift]

    edit_header(file, edit)


@kind(REFUSED)
def offsets_of_another_length(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)

    def edit(header: dict[str, Any]) -> None:
        begin, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = rng.choice([[begin, end - 1], [end, begin], [begin], [begin, None], "0"])

    edit_header(file, edit)


@kind(REFUSED)
def gap_between_tensors(directory: Path, rng: random.Random) -> None:
    file = some_shard(directory, rng)
    header, data = read_raw(file)
    cut = rng.choice([entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"])
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= cut:
            entry["data_offsets"] = [offset + 16 for offset in entry["data_offsets"]]
    write_raw(file, header, data[:cut] + bytes(16) + data[cut:])


@kind(REFUSED)
def name_twice_in_a_header(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)
    header, data = read_raw(file)
    text = json.dumps(header)
    write_raw(file, text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}", data)


# Tensors


@kind(REFUSED)
def tensor_renamed(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)
    new = rng.choice([f"model.{name}", name + "s", name.upper(), name.replace("weight", "weight_scale") + "_", ""])
    edit_shard(file, lambda entries: entries.update({new: entries.pop(name)}))
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({new: index["weight_map"].pop(name)}))


@kind(REFUSED)
def tensor_missing(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)
    edit_shard(file, lambda entries: entries.pop(name))
    edit_json(directory / INDEX, lambda index: index["weight_map"].pop(name))
    fix_total(directory)


@kind(REFUSED)
def tensor_missing_in_its_shard(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)
    edit_shard(file, lambda entries: entries.pop(name))
    fix_total(directory)


@kind(REFUSED)
def tensor_in_two_shards(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)
    other = rng.choice([other for other in sorted(directory.glob("*.safetensors")) if other != file])
    entry = read_shard(file)[name]
    edit_shard(other, lambda entries: entries.update({name: entry}))
    fix_total(directory)


@kind(REFUSED)
def tensor_nobody_knows(directory: Path, rng: random.Random) -> None:
    file = some_shard(directory, rng)
    name = rng.choice(
        ["layers.0.attn.q_head_norm.weight", "layers.99.attn_norm.weight", "mtp.0.x", "hc_head_fn", "vision"]
    )
    edit_shard(file, lambda entries: entries.update({name: Entry("F32", [2], bytes(8))}))
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({name: file.name}))
    fix_total(directory)


@kind(REFUSED)
def tensor_of_another_size(directory: Path, rng: random.Random) -> None:
    """Everything consistent, only not what the config asks for."""
    file, name = some_tensor(directory, rng)

    def edit(entries: dict[str, Entry]) -> None:
        entry = entries[name]
        entry.shape, entry.data = [2 * entry.shape[0], *entry.shape[1:]], 2 * entry.data

    edit_shard(file, edit)
    fix_total(directory)


@kind(REFUSED)
def scales_of_another_block(directory: Path, rng: random.Random) -> None:
    while True:
        file, name = some_tensor(directory, rng, "F8_E8M0")
        if read_shard(file)[name].shape != [1, 1]:
            break

    def edit(entries: dict[str, Entry]) -> None:
        rows, columns = entries[name].shape
        shape = rng.choice([[1, rows * columns + 1], [rows, 2 * columns], [rows * 4, columns], [columns + 1, rows]])
        entries[name] = Entry("F8_E8M0", shape, b"\x7f" * (shape[0] * shape[1]))

    edit_shard(file, edit)
    fix_total(directory)


# Values


@kind(REFUSED)
def scale_byte_255(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng, "F8_E8M0", text_only=True)
    edit_shard(file, lambda e: set_byte(e, name, rng.randrange(len(e[name].data)), b"\xff"))


@kind(REFUSED)
def fp8_nan(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng, "F8_E4M3", text_only=True)
    edit_shard(file, lambda e: set_byte(e, name, rng.randrange(len(e[name].data)), rng.choice([b"\x7f", b"\xff"])))


@kind(REFUSED)
def float_not_finite(directory: Path, rng: random.Random) -> None:
    dtype, patterns = rng.choice(
        [
            ("BF16", [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\x81\x7f"]),
            ("F32", [b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\0\0\xc0\x7f", b"\1\0\x80\x7f"]),
        ]
    )
    file, name = some_tensor(directory, rng, dtype, text_only=True)
    new = rng.choice(patterns)
    edit_shard(file, lambda e: set_byte(e, name, len(new) * rng.randrange(len(e[name].data) // len(new)), new))


@kind(EITHER)
def nan_in_the_draft(directory: Path, rng: random.Random) -> None:
    """Not read by the text model."""
    names = [
        name for name, entry in read_shard(shard_of(directory, "mtp.0.norm.weight")).items() if entry.dtype == "F32"
    ]
    edit_shard(shard_of(directory, "mtp.0.norm.weight"), lambda e: set_byte(e, rng.choice(names), 0, b"\xff" * 4))


# Index


@kind(REFUSED)
def index_missing(directory: Path, rng: random.Random) -> None:
    (directory / INDEX).unlink()


@kind(REFUSED)
def index_cut(directory: Path, rng: random.Random) -> None:
    text = (directory / INDEX).read_text().rstrip()
    (directory / INDEX).write_text(text[: rng.randrange(len(text))])


@kind(REFUSED)
def index_of_another_form(directory: Path, rng: random.Random) -> None:
    forms = ["[]", "null", "{}", '{"weight_map": {}}', '{"metadata": {"total_size": 1}}', "[" * 100_000, "\xff\xfe{"]
    (directory / INDEX).write_text(rng.choice(forms), encoding="latin-1")


@kind(EITHER)
def index_bit(directory: Path, rng: random.Random) -> None:
    flip(directory / INDEX, rng, 0, (directory / INDEX).stat().st_size)


@kind(REFUSED)
def index_total_size(directory: Path, rng: random.Random) -> None:
    wrong = rng.choice([0, -1, 1, 10**30, None, "12", 1.5, True])
    edit_json(directory / INDEX, lambda index: index["metadata"].update(total_size=wrong))


@kind(REFUSED)
def index_points_to_another_shard(directory: Path, rng: random.Random) -> None:
    file, name = some_tensor(directory, rng)
    other = rng.choice([other.name for other in sorted(directory.glob("*.safetensors")) if other != file])
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({name: other}))


@kind(REFUSED)
def index_points_nowhere(directory: Path, rng: random.Random) -> None:
    _, name = some_tensor(directory, rng)
    nowhere = rng.choice(
        ["model-9.safetensors", "../m.safetensors", "/dev/zero", ".", "", "\0", "\ud800", "x" * 300, 5]
    )
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({name: nowhere}))


@kind(REFUSED)
def index_lacks_a_tensor(directory: Path, rng: random.Random) -> None:
    _, name = some_tensor(directory, rng)
    edit_json(directory / INDEX, lambda index: index["weight_map"].pop(name))


# Config


def edit_section(directory: Path, section: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    edit_json(directory / "config.json", lambda config: edit(config[section] if section else config))


@kind(REFUSED)
def config_missing(directory: Path, rng: random.Random) -> None:
    (directory / "config.json").unlink()


@kind(REFUSED)
def config_cut(directory: Path, rng: random.Random) -> None:
    text = (directory / "config.json").read_text().rstrip()
    (directory / "config.json").write_text(text[: rng.randrange(len(text))])


@kind(REFUSED)
def config_of_another_form(directory: Path, rng: random.Random) -> None:
    (directory / "config.json").write_text(rng.choice(["[]", "3", "{}", "[" * 100_000, "nonsense", "\0"]))


@kind(REFUSED)
def config_key_unknown(directory: Path, rng: random.Random) -> None:
    section = rng.choice(["", "quantization_config", "text_config", "vision_config"])
    edit_section(directory, section, lambda keys: keys.update(rotary_temperature=1.0))


@kind(REFUSED)
def config_key_missing(directory: Path, rng: random.Random) -> None:
    section, model = rng.choice([("text_config", TextConfig), ("quantization_config", QuantizationSpec)])
    key = rng.choice([name for name, field in model.model_fields.items() if field.is_required()])
    edit_section(directory, section, lambda keys: keys.pop(key))


@kind(REFUSED)
def config_key_of_another_type(directory: Path, rng: random.Random) -> None:
    key = rng.choice([name for name, field in TextConfig.model_fields.items() if field.is_required()])
    edit_section(directory, "text_config", lambda keys: keys.update({key: rng.choice([{"a": 1}, "many", None])}))


@kind(REFUSED)
def config_size_changed(directory: Path, rng: random.Random) -> None:
    key = rng.choice(
        [
            "vocab_size",
            "hidden_size",
            "moe_intermediate_size",
            "num_attention_heads",
            "head_dim",
            "q_lora_rank",
            "o_lora_rank",
            "n_routed_experts",
            "index_n_heads",
            "index_head_dim",
            "hc_mult",
            "engram_n_heads",
            "engram_head_dim",
            "dspark_markov_rank",
            "dspark_n_routed_experts",
        ]
    )
    factor = rng.choice([2, 4, 1_000_000])
    edit_section(directory, "text_config", lambda keys: keys.update({key: keys[key] * factor}))


@kind(REFUSED)
def config_schedule_changed(directory: Path, rng: random.Random) -> None:
    new = rng.choice(
        [
            {"compress_ratios": [0, 1, 1, 1, 0]},
            {"compress_ratios": [0, 2, 2, 2, 0]},
            {"compress_ratios": [0, 2, 1, 1]},
            {"kv_source_layer_ids": [1]},
            {"kv_source_layer_ids": [1, 2, 3], "candidate_source_layer_id": 3},
            {"index_source_layer_ids": [1, 2]},
            {"engram_layer_ids": [1]},
            {"engram_num_embeddings": [463]},
            {"num_nextn_predict_layers": 0, "compress_ratios": [0, 2, 1, 1]},
            {"n_shared_experts": 0},
            {"dspark_target_layer_ids": [1, 2, 3]},
        ]
    )
    edit_section(directory, "text_config", lambda keys: keys.update(new))


@kind(REFUSED)
def config_block_size(directory: Path, rng: random.Random) -> None:
    block = rng.choice([[128, 128], [16, 32], [32, 16], [1, 32], [64, 64], [0, 32], [32], [-32, 32], "32", None])
    edit_section(directory, "quantization_config", lambda keys: keys.update(weight_block_size=block))


# What may be there


@kind(EITHER)
def index_reordered(directory: Path, rng: random.Random) -> None:
    def edit(index: dict[str, Any]) -> None:
        names = sorted(index["weight_map"])
        rng.shuffle(names)
        index["weight_map"] = {name: index["weight_map"][name] for name in names}
        index["metadata"]["note"] = "reordered"

    edit_json(directory / INDEX, edit)


@kind(EITHER)
def header_written_differently(directory: Path, rng: random.Random) -> None:
    file = some_shard(directory, rng)
    entries = read_shard(file)
    names = sorted(entries)
    rng.shuffle(names)
    shuffled = {name: entries[name] for name in names}
    header = {"__metadata__": {"by": "somebody"}} | header_of(shuffled)
    write_raw(file, json.dumps(header, indent=rng.randrange(4)) + " " * 9, b"".join(e.data for e in shuffled.values()))


@kind(EITHER)
def other_files_beside(directory: Path, rng: random.Random) -> None:
    (directory / rng.choice(["README.md", "golden.safetensors", "model.bin", "tokenizer.json"])).write_bytes(b"other")
