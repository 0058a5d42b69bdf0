"""`mini-deepinfer checkpoint`: exit codes, tables and data, and inspection of the release at its full size."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import DATA, INDEX, make_small, shard_of, sparse_shard
from measured import within_budget
from minideepinfer.checkpoint import Checkpoint, expected_tensors
from minideepinfer.checkpoint.layout import DTYPE_BYTES, shards
from minideepinfer.cli.main import main
from minideepinfer.config import ModelConfig

FULL = DATA / "config.full.json"
VISION_BYTES = 970_536_960


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["checkpoint", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The release with every byte zero: 48 sparse shards, 510 GB long, a few MB on disk."""
    directory = tmp_path_factory.mktemp("released")
    (directory / "config.json").write_bytes(FULL.read_bytes())
    config = ModelConfig.from_file(FULL)
    specs = expected_tensors(config)
    names = [f"vision.{i}" for i in range(259)] + [f"aligner.{i}" for i in range(4)]
    names += ["image_start", "image_end", "image_newline"]
    vision = dict.fromkeys(names[1:], ("BF16", (1024,), 2)) | {names[0]: ("U8", (VISION_BYTES - 265 * 2048,), 1)}
    groups = [vision] + [
        {name: (specs[name].dtype, specs[name].shape, DTYPE_BYTES[specs[name].dtype]) for name in group}
        for group in shards(config)
    ]
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        try:
            sparse_shard(directory / file, group)
        except OSError as error:
            pytest.skip(f"this file system holds no sparse file like {file} ({error})")
        weight_map.update(dict.fromkeys(group, file))
    index = {"metadata": {"total_size": 510_286_023_000}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    yield directory
    shutil.rmtree(directory)  # a copy of it would not be sparse


def test_inspect_the_release(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    data = run_json(capsys, "inspect", str(released))
    seconds = time.perf_counter() - start
    assert (data["tensors"], data["bytes"], data["shards"]) == (96_085, 510_286_023_000, 48)
    assert data["kinds"]["vision"] == {"tensors": 266, "bytes": VISION_BYTES}
    assert data["skipped"]["tensors"] == 266 + 2_401
    within_budget("checkpoint inspect of the release, 96,085 tensors", seconds)


def test_a_mapped_table_of_98_gb_takes_no_memory(released: Path) -> None:
    with Checkpoint.open(released) as checkpoint:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        table = checkpoint.row_table("layers.14.engram.embed.weight", "mmap", torch.device("cpu"))
        rows = table[torch.tensor([0, 200_000_000, 384_016_681])]
        assert table.shape == (384_016_682, 256) and not rows.any()
        assert checkpoint.bytes_read == 0
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 100_000  # kB


def test_size_of_the_released_config(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "size", str(FULL), "--ranks", "4")
    assert (data["tensors"], data["bytes"], data["source"]) == (95_819, 509_315_486_040, "config")
    assert len(data["ranks"]) == 4
    for rank in data["ranks"]:
        assert rank["kinds"]["experts"]["bytes"] == 96 * 40 * 18_800_640
        assert "draft" not in rank["kinds"]
        assert rank["kinds"]["head"] == data["kinds"]["head"]
    for kind in ("experts", "engram tables"):
        assert sum(rank["kinds"][kind]["bytes"] for rank in data["ranks"]) == data["kinds"][kind]["bytes"]
    per_token = {name: cache["bytes_per_token"] for name, cache in data["caches"].items()}
    assert per_token == {"float32": 6_400, "bf16": 3_200, "released": 890}  # spec 5
    assert data["caches"]["released"]["bytes_per_page"] == 64 * 890
    assert data["caches"]["released"]["bytes_per_request"] == 40 * (128 + 5 + 1) * 528 + 3 * 4 * 4096
    assert data["caches"]["bf16"]["bytes_per_request"] == 40 * (128 + 5 + 1) * 1024 + 3 * 4 * 4096


def test_rows_that_do_not_divide_are_all_held(capsys: pytest.CaptureFixture[str]) -> None:
    """462 and 630 rows over 4 ranks."""
    data = run_json(capsys, "size", str(DATA / "config.tiny.json"), "--ranks", "4")
    sizes = [rank["kinds"]["engram tables"]["bytes"] for rank in data["ranks"]]
    assert sum(sizes) == data["kinds"]["engram tables"]["bytes"] == 33 * (462 + 630)
    assert sizes == [33 * (116 + 158)] * 3 + [33 * (462 - 3 * 116 + 630 - 3 * 158)], "the last part is the shortest"


def test_size_of_a_directory_counts_its_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_small(tmp_path)
    data = run_json(capsys, "size", str(directory))
    assert data["source"] == "shards"
    assert data["bytes"] == json.loads((directory / INDEX).read_text())["metadata"]["total_size"]
    shard_of(directory, "embed.weight").unlink()
    assert main(["checkpoint", "size", str(directory)]) == 1
    assert "model-00001" in capsys.readouterr().err


def test_tables_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["checkpoint", "size", str(FULL), "--ranks", "4"]) == 0
    out = capsys.readouterr().out
    for part in (
        "509,315,486,040",
        "largest of 4 ranks",
        "72.19 GB",
        "not read",
        "3,200 B per token",
        "890 B per token",
        "56,960 B",
    ):
        assert part in out
    assert main(["checkpoint", "inspect", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "990 tensors in 3 shards" in out and "169 tensors, 1,638,710 bytes" in out


def test_make_tiny_then_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "new")
    assert main(["checkpoint", "make-tiny", directory, "--seed", "3"]) == 0
    assert run_json_after(capsys, directory)["tensors"] == 1_797
    assert main(["checkpoint", "make-tiny", directory]) == 1
    assert "not empty" in capsys.readouterr().err


def run_json_after(capsys: pytest.CaptureFixture[str], directory: str) -> dict[str, Any]:
    capsys.readouterr()
    return run_json(capsys, "inspect", directory)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "/does/not/exist"], 1, "/does/not/exist: cannot be read"),
        (["size", "/does/not/exist"], 1, "/does/not/exist"),
        (["inspect", str(FULL)], 1, "index.json"),
        (["size", "tiny", "--ranks", "3"], 1, "8 routed experts"),
        (["size", "tiny", "--ranks", "0"], 2, "not at least 1"),
        (["make-tiny", "x", "--seed", "-1"], 2, "negative"),
        (["make-tiny", "x", "--seed", "one"], 2, "invalid"),
        (["explode"], 2, "invalid choice"),
        ([], 2, "required"),
    ],
)
def test_mistakes(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
