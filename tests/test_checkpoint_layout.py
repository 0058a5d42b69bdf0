"""The table of tensors against the inventory of spec 2.1, and what is refused before any data is read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import (
    DATA,
    INDEX,
    edit_json,
    edit_shard,
    fix_total,
    make_small,
    read_shard,
    shard_of,
    small_config,
    write_shard,
)
from minideepinfer.checkpoint import Checkpoint, expected_tensors, verify
from minideepinfer.checkpoint.layout import scale_shape
from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError, ConfigError


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_small(tmp_path)


@cache
def released() -> dict[str, Any]:
    return expected_tensors(ModelConfig.from_file(DATA / "config.full.json"))


def test_released_counts_and_bytes() -> None:
    specs = released()
    assert len(specs) == 95_819
    assert sum(spec.nbytes for spec in specs.values()) == 509_315_486_040
    assert sum(spec.kind == "draft" for spec in specs.values()) == 2_401
    expert = [spec.nbytes for name, spec in specs.items() if name.startswith("layers.7.ffn.experts.200.")]
    assert (len(expert), sum(expert)) == (6, 18_800_640)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.39.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.39.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.3.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.3.ffn.experts.383.w1.scale", "F8_E8M0", (2304, 160)),
        ("layers.3.ffn.experts.0.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.5.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72)),
        ("layers.5.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.5.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.14.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.36.attn.indexer.weights_proj.weight", "BF16", (32, 5120)),
        ("layers.1.engram.embed.scale", "F8_E8M0", (384006168, 8)),
        ("layers.14.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.14.engram.k_weight", "BF16", (4, 5120)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.1.ffn.gate.weight", "BF16", (128, 5120)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.2.markov_head.head.weight", "BF16", (129280, 256)),
    ],
)
def test_released_shapes(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    spec = released()[name]
    assert (spec.dtype, spec.shape) == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 pools nothing
        "layers.24.attn.compressor.wkv.weight",  # reindex: keys are those of layer 20
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.engram.q_weight",
        "mtp.0.norm.weight",
        "mtp.0.attn.indexer.wq_b.weight",
        "mtp.0.ffn.experts.128.w1.weight",
        "model.embed.weight",
    ],
)
def test_absent_on_purpose(name: str) -> None:
    assert name not in released()


@pytest.mark.parametrize("directory", ["tiny", DATA / "golden" / "tiny-a", DATA / "golden" / "tiny-b"])
def test_checkpoints_of_others_open(directory: str | Path) -> None:
    with Checkpoint.open(directory) as checkpoint:
        total, skipped = checkpoint.summary.total, checkpoint.summary.skipped
        index = json.loads((checkpoint.path / INDEX).read_text())
        assert (total.tensors, total.bytes) == (len(index["weight_map"]), index["metadata"]["total_size"])
        assert skipped.tensors == sum(name.startswith("mtp.") for name in index["weight_map"])
        assert checkpoint.bytes_read == 0


def test_vision_is_recognised_by_name_and_counted(small: Path) -> None:
    before = verify(small).summary
    file = shard_of(small, "embed.weight")
    vision = {"vision.blocks.0.w": ("F16", [3, 5]), "aligner.w": ("F32", [2]), "image_start": ("BF16", [7])}
    sizes = {"F16": 2, "F32": 4, "BF16": 2}

    def add(entries: dict[str, Any]) -> None:
        kind = type(next(iter(entries.values())))
        for name, (dtype, shape) in vision.items():
            count = shape[0] * (shape[1] if len(shape) > 1 else 1)
            entries[name] = kind(dtype, shape, bytes(count * sizes[dtype]))

    edit_shard(file, add)
    edit_json(small / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(vision, file.name)))
    fix_total(small)
    after = verify(small).summary
    assert (after.kinds["vision"].tensors, after.kinds["vision"].bytes) == (3, 30 + 8 + 14)
    assert after.skipped.tensors == before.skipped.tensors + 3
    with Checkpoint.open(small) as checkpoint, pytest.raises(CheckpointError, match=r"vision\.blocks\.0\.w .*F16"):
        checkpoint.tensor("vision.blocks.0.w")


def test_block_size_of_the_config_must_fit_the_scales(tmp_path: Path) -> None:
    """Case L1: FP8 weight [64, 96] with scales [2, 3]."""
    small = make_small(tmp_path)
    assert verify(small).tensors["layers.0.attn.wq_a.weight"].shape == (64, 96)
    assert verify(small).tensors["layers.0.attn.wq_a.scale"].shape == (2, 3)
    edit_json(small / "config.json", lambda c: c["quantization_config"].update(weight_block_size=[128, 128]))
    with pytest.raises(CheckpointError) as refused:
        verify(small)
    message = str(refused.value)
    file = shard_of(small, "layers.0.attn.wq_a.scale").name
    for part in (f"layers.0.attn.wq_a.scale in {file}", "[2, 3]", "[1, 1]", "64 x 96", "128 x 128", "32 x 32"):
        assert part in message


def test_block_size_is_never_guessed(tmp_path: Path) -> None:
    """Case L1: a silent config is refused."""
    small = make_small(tmp_path)
    edit_json(small / "config.json", lambda c: c["quantization_config"].pop("weight_block_size"))
    with pytest.raises(ConfigError, match=r"config\.json: quantization_config\.weight_block_size"):
        verify(small)


@pytest.mark.parametrize(
    ("rows", "columns", "block", "shape"),
    [(64, 96, (32, 32), (2, 3)), (65, 97, (32, 32), (3, 4)), (64, 96, (128, 128), (1, 1)), (1, 1, (32, 32), (1, 1))],
)
def test_scale_shape(rows: int, columns: int, block: tuple[int, int], shape: tuple[int, int]) -> None:
    assert scale_shape(rows, columns, block) == shape


def test_experts_have_32_logical_columns_per_scale(small: Path) -> None:
    """Case L2: what lies on disk divides to 16; scales of 16 columns would be another format and are refused."""
    name = "layers.1.ffn.experts.2.w1"
    weight, scale = verify(small).tensors[f"{name}.weight"], verify(small).tensors[f"{name}.scale"]
    assert weight.shape[1] / scale.shape[1] == 16

    def finer(entries: dict[str, Any]) -> None:
        entry = entries[f"{name}.scale"]
        entry.shape, entry.data = [entry.shape[0], 2 * entry.shape[1]], 2 * entry.data

    edit_shard(shard_of(small, f"{name}.scale"), finer)
    fix_total(small)
    with pytest.raises(CheckpointError, match=r"experts\.2\.w1\.scale .*blocks of 1 x 32.*look like blocks of 1 x 16"):
        verify(small)


def test_error_lists_a_few_faults_and_counts_the_rest(small: Path) -> None:
    edit_json(small / "config.json", lambda c: c["text_config"].update(moe_intermediate_size=64))
    with pytest.raises(CheckpointError, match=r"expected is .*; and \d+ more$"):
        verify(small)


def test_index_is_needed(small: Path) -> None:
    (small / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read .*also one of a single shard"):
        verify(small)


def test_a_single_shard_with_an_index_is_read(small: Path) -> None:
    entries = {name: entry for file in small.glob("*.safetensors") for name, entry in read_shard(file).items()}
    for file in small.glob("*.safetensors"):
        file.unlink()
    write_shard(small / "model.safetensors", entries)
    edit_json(small / INDEX, lambda index: index.update(weight_map=dict.fromkeys(entries, "model.safetensors")))
    assert verify(small).summary.total.tensors == len(entries)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "..", "a\\b", "sub/x.safetensors", "", "\0", 3])
def test_index_cannot_lead_out_of_the_directory(small: Path, shard: object) -> None:
    edit_json(small / INDEX, lambda index: index["weight_map"].update({"head.weight": shard}))
    with pytest.raises(CheckpointError):
        verify(small)


def test_config_with_endless_experts_is_refused() -> None:
    data = small_config()
    data["text_config"]["n_routed_experts"] = 2_000_000_000
    with pytest.raises(ConfigError, match="experts; at most"):
        expected_tensors(ModelConfig.from_dict(data))
