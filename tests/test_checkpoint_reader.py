"""Reading: values, dtypes, placements, and that only what is asked for is read."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_files import Entry, edit_shard, make_small, read_shard, shard_of
from minideepinfer.checkpoint import Checkpoint, reader, verify
from minideepinfer.errors import CheckpointError
from minideepinfer.quantization import decode_fp8_blocks
from safetensors import safe_open

CPU = torch.device("cpu")
TABLE = "layers.0.engram.embed"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small(tmp_path_factory.mktemp("small"))


@pytest.fixture
def checkpoint(small: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(small) as opened:
        yield opened


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return make_small(tmp_path)


def damage(directory: Path, name: str, position: int, new: bytes) -> None:
    def edit(entries: dict[str, Entry]) -> None:
        data = bytearray(entries[name].data)
        data[position : position + len(new)] = new
        entries[name].data = bytes(data)

    edit_shard(shard_of(directory, name), edit)


def test_every_tensor_equals_what_the_safetensors_library_reads(small: Path, checkpoint: Checkpoint) -> None:
    count = 0
    for file in small.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                expected, found = stored.get_tensor(name), checkpoint.tensor(name)
                if expected.dtype in (torch.int8, torch.float8_e8m0fnu):
                    expected = expected.view(torch.uint8)
                assert found.dtype == expected.dtype
                assert found.view(torch.uint8).equal(expected.view(torch.uint8))
                count += 1
    assert count == checkpoint.summary.total.tensors
    assert checkpoint.bytes_read == checkpoint.summary.total.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_decodes_fp8_and_casts_bf16(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    name = "layers.0.attn.wq_a"
    expected = decode_fp8_blocks(checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.scale"), dtype)
    assert checkpoint.dense(name, dtype, CPU).equal(expected)
    gate = checkpoint.dense("layers.0.ffn.gate", dtype, CPU)
    assert gate.dtype == dtype and gate.equal(checkpoint.tensor("layers.0.ffn.gate.weight").to(dtype))


def test_dense_uses_the_block_of_the_config(tmp_path: Path) -> None:
    """Case L1: read from the config: another block, consistent with the scales, is decoded with that block."""
    from checkpoint_files import small_config

    config = small_config()
    config["quantization_config"]["weight_block_size"] = [16, 64]
    with Checkpoint.open(make_small(tmp_path, config)) as checkpoint:
        weight, scale = (checkpoint.tensor(f"layers.0.attn.wq_a.{part}") for part in ("weight", "scale"))
        assert (weight.shape, scale.shape) == ((64, 96), (4, 2))
        found = checkpoint.dense("layers.0.attn.wq_a", torch.float32, CPU)
        assert found[17, 70] == weight[17, 70].float() * 2.0 ** (int(scale[1, 1]) - 127)


def test_experts_stay_packed(checkpoint: Checkpoint) -> None:
    prefix = "layers.1.ffn.experts"
    packed = checkpoint.experts(prefix, range(1, 3), CPU)
    assert (packed.num_local, packed.expert_start) == (2, 1)
    for local, expert in enumerate((1, 2)):
        for part, weight, scale in (
            ("w1", packed.w13[local, 0], packed.w13_scale[local, 0]),
            ("w3", packed.w13[local, 1], packed.w13_scale[local, 1]),
            ("w2", packed.w2[local], packed.w2_scale[local]),
        ):
            assert weight.equal(checkpoint.tensor(f"{prefix}.{expert}.{part}.weight"))
            assert scale.equal(checkpoint.tensor(f"{prefix}.{expert}.{part}.scale"))
    assert checkpoint.experts(prefix, range(4, 4), CPU).w13.shape == (0, 2, 32, 48)


def test_only_what_is_asked_for_is_read(small: Path) -> None:
    with Checkpoint.open(small) as checkpoint:
        stored = verify(small).tensors
        checkpoint.experts("layers.1.ffn.experts", range(1, 3), CPU)
        wanted = [t for n, t in stored.items() if n.startswith(("layers.1.ffn.experts.1.", "layers.1.ffn.experts.2."))]
        assert checkpoint.bytes_read == sum(tensor.nbytes for tensor in wanted)


@pytest.mark.parametrize("placement", ["device", "host", "mmap"])
@pytest.mark.parametrize("part", ["weight", "scale"])
def test_row_tables_are_the_same_bytes_everywhere(small: Path, placement: str, part: str) -> None:
    entry = read_shard(shard_of(small, f"{TABLE}.{part}"))[f"{TABLE}.{part}"]
    expected = torch.frombuffer(bytearray(entry.data), dtype=torch.uint8).reshape(entry.shape)
    with Checkpoint.open(small) as checkpoint, warnings.catch_warnings():
        warnings.simplefilter("error")
        table = checkpoint.row_table(f"{TABLE}.{part}", placement, CPU)
        shard = checkpoint.row_table(f"{TABLE}.{part}", placement, CPU, range(100, 231))
        empty = checkpoint.row_table(f"{TABLE}.{part}", placement, CPU, range(7, 7))
    assert table.dtype == torch.uint8 and table.equal(expected)
    assert shard.equal(expected[100:231])
    assert empty.shape == (0, entry.shape[1])


def test_mapped_weights_are_not_read(checkpoint: Checkpoint) -> None:
    table = checkpoint.row_table(f"{TABLE}.weight", "mmap", CPU)
    assert checkpoint.bytes_read == 0
    assert table[[461, 3]].shape == (2, 32)


@pytest.mark.parametrize("placement", ["device", "host", "mmap"])
@pytest.mark.parametrize("position", [0, 256, 461])
def test_scale_byte_255_in_a_table(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, placement: str, position: int
) -> None:
    """Found in every piece of the scan, the last short one included."""
    monkeypatch.setattr(reader, "PIECE_BYTES", 256)
    damage(damaged, f"{TABLE}.scale", position, b"\xff")
    with (
        Checkpoint.open(damaged) as checkpoint,
        pytest.raises(CheckpointError, match=rf"embed\.scale in model-.*element {position} of .*255"),
    ):
        checkpoint.row_table(f"{TABLE}.scale", placement, CPU)


@pytest.mark.parametrize(
    ("name", "position", "new", "element"),
    [
        ("embed.weight", 14, b"\x80\x7f", 7),  # infinity in bfloat16
        ("layers.3.ffn.gate.weight", 2, b"\xc1\xff", 1),  # NaN
        ("layers.1.hc_ffn_fn", 8, b"\x00\x00\xc0\x7f", 2),
        ("layers.1.attn.attn_sink", 4, b"\x00\x00\x80\xff", 1),
        ("layers.0.attn.wq_a.weight", 5, b"\x7f", 5),
        ("layers.0.attn.wq_a.weight", 700, b"\xff", 700),
        ("layers.0.attn.wq_a.scale", 5, b"\xff", 5),
        ("layers.2.ffn.experts.3.w2.scale", 1, b"\xff", 1),
        (f"{TABLE}.weight", 999, b"\x7f", 999),
    ],
)
def test_values_that_are_not_finite(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, name: str, position: int, new: bytes, element: int
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 512)
    damage(damaged, name, position, new)
    file = shard_of(damaged, name).name
    with Checkpoint.open(damaged) as checkpoint:
        with pytest.raises(CheckpointError, match=rf"^{name} in {file}: element {element} of "):
            checkpoint.tensor(name)
        checkpoint.tensor("norm.weight")  # the rest can still be read


def test_pieces_make_up_the_whole(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(small) as checkpoint:
        whole = checkpoint.tensor("layers.1.hc_ffn_fn")
        monkeypatch.setattr(reader, "PIECE_BYTES", 100)
        assert checkpoint.tensor("layers.1.hc_ffn_fn").equal(whole)


def test_truncated_after_opening(damaged: Path) -> None:
    with Checkpoint.open(damaged) as checkpoint:
        file = shard_of(damaged, "layers.2.hc_attn_fn")
        file.write_bytes(file.read_bytes()[:-40])
        names = [name for name, tensor in verify_names(checkpoint) if tensor == file]
        with pytest.raises(CheckpointError, match="truncated after it was opened"):
            for name in names:
                checkpoint.tensor(name)


def verify_names(checkpoint: Checkpoint) -> list[tuple[str, Path]]:
    return [(name, stored.file) for name, stored in checkpoint._tensors.items()]


def test_unknown_tensor(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor layers\.99\.attn_norm\.weight"):
        checkpoint.tensor("layers.99.attn_norm.weight")


def test_one_shard_is_open_at_a_time_and_none_after_closing(small: Path) -> None:
    def open_shards() -> list[str]:
        targets = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
        return sorted(target.name for target in targets if target.parent == small.resolve())

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    checkpoint = Checkpoint.open(small)
    assert open_shards() == []
    for name in ("embed.weight", "layers.0.attn_norm.weight", "head.weight"):
        checkpoint.tensor(name)
        assert open_shards() == [shard_of(small, name).name]
    checkpoint.close()
    assert open_shards() == []
    assert checkpoint.tensor("norm.weight").shape == (96,)  # opens it again
    checkpoint.close()


def test_memory_stays_with_what_was_asked_for(small: Path) -> None:
    """Reading every tensor one after the other does not keep them."""
    with Checkpoint.open(small) as checkpoint:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(20):
            for name, _ in verify_names(checkpoint):
                checkpoint.tensor(name)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert checkpoint.bytes_read == 20 * checkpoint.summary.total.bytes
        assert grown < checkpoint.bytes_read / 2
