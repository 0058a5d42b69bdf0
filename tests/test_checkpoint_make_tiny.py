"""The tiny checkpoint: the same bytes for the same seed, the released layout, values of a sensible size."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import DATA, INDEX, make_small, read_shard, small_config
from minideepinfer.checkpoint import Checkpoint
from minideepinfer.checkpoint.layout import shards
from minideepinfer.checkpoint.make_tiny import DEFAULT_CONFIG, make_tiny
from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError
from minideepinfer.quantization import decode_fp8_rows, decode_mxfp4

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def test_same_seed_same_bytes_other_seed_other_bytes(tiny: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tiny)
    make_tiny(tmp_path / "other", seed=1)
    other = contents(tmp_path / "other")
    same = [name for name, data in contents(tiny).items() if other[name] == data]
    assert same == ["config.json", INDEX]


def test_tensor_bytes_are_those_of_every_machine(tmp_path: Path) -> None:
    """Raw PCG64 draws and exact float operations: recorded once, whatever the versions of numpy and torch."""
    digest = hashlib.sha256()
    directory = make_small(tmp_path, seed=7)
    tensors = {name: entry for file in directory.glob("*.safetensors") for name, entry in read_shard(file).items()}
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode() + tensors[name].data)
    assert digest.hexdigest() == "109b6c9a324d9427c6fb3174c4853f87723a40526a56b5fc49158edc265a907d"


def test_config_is_the_one_of_the_specification(tiny: Path) -> None:
    assert (tiny / "config.json").read_bytes() == DEFAULT_CONFIG.read_bytes()
    assert json.loads(DEFAULT_CONFIG.read_text()) == json.loads((DATA / "config.tiny.json").read_text())


def test_it_opens_and_is_spread_over_shards_as_released(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        assert checkpoint.summary.kinds["draft"].tensors == 5 * 3 + 226 == 241
    assert len(list(tiny.glob("model-*-of-00019.safetensors"))) == 1 + 12 + 1 + 3 + 2
    engram = read_shard(tiny / "model-00018-of-00019.safetensors")
    assert sorted(name.removeprefix("layers.1.engram.") for name in engram) == [
        "embed.scale", "embed.weight", "k_weight", "q_weight", "wkv.scale", "wkv.weight"
    ]  # fmt: skip


def test_released_grouping() -> None:
    """Spec 2.1, without the vision shard in front: embed, 40 blocks, head and norm, three drafts, two Engram layers."""
    groups = shards(ModelConfig.from_file(DATA / "config.full.json"))
    assert len(groups) == 47
    assert groups[0] == ["embed.weight"]
    assert all(name.startswith("layers.20.") for name in groups[21])
    assert sorted(groups[41]) == ["head.weight", "norm.weight"]
    assert all(name.startswith("mtp.2.") for name in groups[44])
    assert [len(groups[45]), len(groups[46])] == [6, 6]
    assert all(name.startswith("layers.14.engram.") for name in groups[46])


@pytest.mark.parametrize("block", [[32, 32], [48, 40]])
def test_blocks_at_the_edge_may_be_ragged(tmp_path: Path, block: list[int]) -> None:
    config = small_config()
    config["quantization_config"]["weight_block_size"] = block
    with Checkpoint.open(make_small(tmp_path, config)) as checkpoint:
        matrix = checkpoint.dense("layers.2.attn.wq_b", torch.float32, CPU)  # [128, 64]
    assert matrix.std().item() == pytest.approx(1.5 / 8, rel=0.05)


def test_values_are_of_a_sensible_size(tiny: Path) -> None:
    """Norms near 1, projections near 1 / sqrt(columns), nothing constant, no FP8 block saturated."""
    with Checkpoint.open(tiny) as checkpoint:
        norm = checkpoint.tensor("layers.3.attn_norm.weight").float()
        assert norm.min() > 0.2 and norm.max() < 1.8 and norm.std() > 0.1
        for name, gain in (("wq_a", 1.0), ("wq_b", 1.5), ("wkv", 1.0), ("wo_a", 1.0), ("wo_b", 2.0)):
            matrix = checkpoint.dense(f"layers.5.attn.{name}", torch.float32, CPU)
            assert matrix.std().item() == pytest.approx(gain / matrix.shape[1] ** 0.5, rel=0.05)
        experts = checkpoint.experts("layers.5.ffn.experts", range(16), CPU)
        w2 = decode_mxfp4(experts.w2, experts.w2_scale, torch.float32)
        assert w2.std().item() == pytest.approx(0.6 / 8, rel=0.05)
        rows = [checkpoint.row_table(f"layers.4.engram.embed.{part}", "host", CPU) for part in ("weight", "scale")]
        assert decode_fp8_rows(*rows, dtype=torch.float32).std().item() == pytest.approx(1.0, rel=0.05)
        assert checkpoint.tensor("embed.weight").float().std().item() == pytest.approx(3.0, rel=0.05)


def test_tensors_are_independent(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        matrices = [checkpoint.dense(f"layers.{i}.attn.wkv", torch.float32, CPU).flatten() for i in range(4)]
    correlation = torch.corrcoef(torch.stack(matrices)) - torch.eye(4)
    assert correlation.abs().max() < 0.05


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        make_tiny(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        make_tiny(tmp_path / "file")


def test_the_released_config_is_not_tiny(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="needs 509315486040 bytes"):
        make_tiny(tmp_path / "huge", DATA / "config.full.json")
    assert not (tmp_path / "huge").exists()
