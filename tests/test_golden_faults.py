"""What is no golden set, or not one of the checkpoint beside it, is refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_sets import GOLDEN, change_manifest, change_tensors, linked_set
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig
from minideepinfer.errors import ConfigError, OperatorError, VerificationError
from minideepinfer.testing.golden import verify
from torch import Tensor

TINY_A = GOLDEN / "tiny-a"


def drop(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda path: change_manifest(path, change)


def tensors(change: Callable[[dict[str, Tensor]], object], *, sign: bool = True) -> Callable[[Path], object]:
    return lambda path: change_tensors(path, "golden.s7.fp32-noq.safetensors", change, sign=sign)


def garbage(path: Path) -> None:
    """No safetensors, but with the right checksum."""
    name, content = "golden.s7.fp32-noq.safetensors", b"no safetensors"
    (path / name).unlink()
    (path / name).write_bytes(content)
    change_manifest(path, lambda m: m["sha256"].update({name: hashlib.sha256(content).hexdigest()}))


FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no manifest": (drop("manifest.json"), ("manifest.json", "cannot be read")),
    "missing file": (drop("golden.s7.fp32-noq.safetensors"), ("golden.s7.fp32-noq.safetensors", "cannot be read")),
    "missing shard": (drop("model-00001-of-00002.safetensors"), ("model-00001-of-00002.safetensors",)),
    "other bytes": (
        tensors(lambda t: t["logits"].mul_(2), sign=False),
        ("golden.s7.fp32-noq.safetensors", "sha256"),
    ),
    "wrong checksum": (
        manifest(lambda m: m["sha256"].update({"tokenizer.json": "0" * 64})),
        ("tokenizer.json", "sha256"),
    ),
    "no checksum": (
        manifest(lambda m: m["sha256"].pop("golden.s7.fp32-noq.safetensors")),
        ("golden.s7.fp32-noq.safetensors", "no sha256"),
    ),
    "other config": (
        manifest(lambda m: m["config"]["text_config"].update(swiglu_limit=3.0)),
        ("manifest.json", "text_config.swiglu_limit"),
    ),
    "no sequences": (manifest(lambda m: m.pop("sequences")), ("manifest.json", "sequences")),
    "outside": (
        manifest(lambda m: m["sequences"][1]["files"].update({"fp32-q": "../golden.safetensors"})),
        ("manifest.json", "../golden.safetensors"),
    ),
    "token id": (manifest(lambda m: m["sequences"][1]["token_ids"].append(512)), ("manifest.json", "s7", "512")),
    "probes": (
        manifest(lambda m: m["sequences"][1].update(probe_positions=[3, 9])),
        ("manifest.json", "s7", "probe_positions"),
    ),
    "prompt": (manifest(lambda m: m["sequences"][3]["bounded"].update(prompt=500)), ("manifest.json", "s101", "500")),
    "other prompt": (
        manifest(lambda m: m["sequences"][3]["bounded"].update(prompt=70)),
        ("bounded.s101.safetensors", "rows"),
    ),
    "longer": (
        manifest(lambda m: m["sequences"][1]["token_ids"].append(5)),
        ("golden.s7.fp32-noq.safetensors", "rows"),
    ),
    "no safetensors": (garbage, ("golden.s7.fp32-noq.safetensors", "cannot be read as safetensors")),
    "row width": (
        tensors(lambda t: t.update({"layers.2.attn.in": t["layers.2.attn.in"][:, :64].contiguous()})),
        ("golden.s7.fp32-noq.safetensors", "layers.2.attn.in"),
    ),
    "compared width": (
        tensors(lambda t: t.update({"logits": t["logits"][:, :64].contiguous()})),
        ("golden.s7.fp32-noq.safetensors", "logits"),
    ),
    "too few rows": (
        tensors(lambda t: t.update({"layers.2.attn.out": t["layers.2.attn.out"][:5].contiguous()})),
        ("golden.s7.fp32-noq.safetensors", "layers.2.attn.out"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_set_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    change, words = FAULTS[fault]
    path = linked_set(TINY_A, tmp_path / "set")
    change(path)
    with pytest.raises(VerificationError) as caught:
        verify(path, variants=["fp32-noq"])
    assert all(word in str(caught.value) for word in words), caught.value
    assert main(["verify", str(path), "--variant", "fp32-noq"]) == 1
    assert str(caught.value) in capsys.readouterr().err


def test_a_manifest_that_is_not_json(tmp_path: Path) -> None:
    path = linked_set(TINY_A, tmp_path / "set")
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_text("{")
    with pytest.raises(VerificationError, match="not JSON"):
        verify(path)


def test_what_is_asked_for_must_be_there() -> None:
    with pytest.raises(VerificationError, match=r"no sequence \['s9'\].*'s101'"):
        verify(TINY_A, sequences=["s9"])
    with pytest.raises(VerificationError, match="variant 'fp16-q' is unknown"):
        verify(TINY_A, variants=["fp16-q"])
    with pytest.raises(VerificationError, match="nothing could be compared in variant fp32-noq-a8"):
        verify(TINY_A, variants=["fp32-noq-a8"])
    with pytest.raises(ConfigError, match="dtype, replay cannot be set"):
        verify(TINY_A, config=EngineConfig(dtype="bfloat16", replay="bounded"))
    with pytest.raises(OperatorError, match="no attention operator 'none'"):
        verify(TINY_A, ops={"attention": "none"})
