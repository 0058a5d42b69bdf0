"""Cases L1 and L2: checkpoints whose scale blocks are not what one would guess, loaded for a plan with the operator."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minideepinfer.errors import MiniDeepInferError
from minideepinfer.quantization import decode_fp8_blocks
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.contract import Violation
from minideepinfer.testing.end_to_end import compare_in_model, nearest_model, ops_at
from minideepinfer.testing.models import altered_copy
from minideepinfer.testing.rehearsal import Stage
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import same_bits

BLOCKS = ((32, 32), (128, 128), (48, 80))
"""Rows and columns that share a scale: the release's; one that few matrices fill; one that fits no matrix."""
SHORT = ((9, 5), (1, 1))
"""A prefill and a decode step of two requests."""


def l1(subject: Subject) -> None:
    """FP8 weights are decoded with the block size of the config, or refused; never guessed."""
    dtype = subject.dtypes[0]
    _check_ragged()
    for block in BLOCKS:
        stage, places = nearest_model(subject, dtype, block)
        stage = replace(stage, path=_every_scale_its_own(stage.path), steps=SHORT)
        _check_dense(stage.runner(ops_at(subject, places)), stage.path, block)
        if not subject.interpreted or block is BLOCKS[-1]:
            compare_in_model(subject, stage, places)
    stage, places = nearest_model(subject, dtype)
    for block_size, words in (
        ([128, 128], (".scale", "has shape", "blocks of 128 x 128", "look like blocks of 32 x 32")),
        (None, ("weight_block_size",)),
    ):
        path = altered_copy(stage.path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"]["weight_block_size"] = block_size
        if block_size is None:
            del config["quantization_config"]["weight_block_size"]
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        must_refuse(replace(stage, path=path), ops_at(subject, places), words)


def l2(subject: Subject) -> None:
    """Experts have one scale for 32 logical columns, though bytes on disk over scales is 16."""
    stage, places = nearest_model(subject, subject.dtypes[0])
    stage = replace(stage, steps=SHORT)
    _check_experts(stage.runner(ops_at(subject, places)), stage.path)
    compare_in_model(subject, stage, places)
    finer = altered_copy(stage.path)
    for file in finer.glob("*.safetensors"):
        tensors = load_file(file)
        for key in [key for key in tensors if key.endswith("experts.0.w1.scale") and "shared" not in key]:
            tensors[key] = torch.cat([tensors[key].view(torch.uint8)] * 2, 1).view(tensors[key].dtype)
        save_file(tensors, file)
    words = ("experts.0.w1.scale", "blocks of 1 x 32", "look like blocks of 1 x 16")
    must_refuse(replace(stage, path=finer), ops_at(subject, places), words)


def must_refuse(stage: Stage, ops: Mapping[str, Any], words: Sequence[str]) -> None:
    """A checkpoint that contradicts its config is refused in these words, whatever the operators; it is then removed.

    Raises:
        Violation: it is not.
    """
    try:
        stage.runner(ops)
    except MiniDeepInferError as error:
        if missing := [word for word in words if word not in str(error)]:
            raise Violation(f"refused without {missing}: {error}") from None
    else:
        raise Violation(f"a checkpoint that contradicts its config is loaded; {', '.join(words)} was to be refused")
    finally:
        shutil.rmtree(stage.path.parent, ignore_errors=True)


def _every_scale_its_own(path: Path) -> Path:
    """A copy in which neighbouring blocks of `layers.1.attn.wq_a` have different powers of two."""
    copy = altered_copy(path)
    for file in copy.glob("*.safetensors"):
        tensors = load_file(file)
        for key in [key for key in tensors if key == "layers.1.attn.wq_a.scale"]:
            scale = tensors[key].view(torch.uint8)
            tensors[key] = (118 + torch.arange(scale.numel()) % 7).to(torch.uint8).view(scale.shape)
            tensors[key] = tensors[key].view(torch.float8_e8m0fnu)
        save_file(tensors, file)
    return copy


def _stored(path: Path, name: str) -> Tensor:
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            return tensors[name]
    raise Violation(f"{path}: has no {name}")


def _check_dense(runner: Runner, path: Path, block: tuple[int, int]) -> None:
    """A matrix in memory against its bytes, element by element by index arithmetic."""
    codes, scale = (_stored(path, f"layers.1.attn.wq_a.{part}") for part in ("weight", "scale"))
    rows, columns = torch.arange(codes.shape[0]) // block[0], torch.arange(codes.shape[1]) // block[1]
    exponents = scale.view(torch.uint8)[rows][:, columns].double() - 127
    loaded = runner.model.weights.layers[1].attention.wq_a.cpu()
    if not torch.equal(loaded.double(), codes.double() * exponents.exp2()):
        raise Violation(f"layers.1.attn.wq_a is not its codes times the scales of {block[0]} x {block[1]} blocks")


def _check_ragged() -> None:
    """[65, 97] with scales [3, 4], all of them different: no model has such a matrix, its decoder is asked alone."""
    codes = (torch.arange(65 * 97) % 127).to(torch.uint8).view(65, 97)
    scale = (118 + torch.arange(12)).to(torch.uint8).view(3, 4)
    exponents = scale[torch.arange(65) // 32][:, torch.arange(97) // 32].double() - 127
    decoded = decode_fp8_blocks(codes, scale, torch.float32)
    if not torch.equal(decoded.double(), codes.view(torch.float8_e4m3fn).double() * exponents.exp2()):
        raise Violation("a weight of 65 x 97 is not its codes times its 3 x 4 scales")


def _check_experts(runner: Runner, path: Path) -> None:
    """The packed experts in memory are those on disk, and what a reader of 32 columns a scale decodes."""
    moe = runner.model.weights.layers[1].moe
    assert moe is not None  # a rehearsal keeps weights
    experts = moe.experts
    for part, packed, exponents in (
        ("w1", experts.w13[0, 0], experts.w13_scale[0, 0]),
        ("w3", experts.w13[0, 1], experts.w13_scale[0, 1]),
        ("w2", experts.w2[0], experts.w2_scale[0]),
    ):
        for kind, tensor in (("weight", packed), ("scale", exponents)):
            stored = _stored(path, f"layers.1.ffn.experts.0.{part}.{kind}").view(torch.uint8)
            if not same_bits(tensor.cpu(), stored):
                raise Violation(f"layers.1.ffn.experts.0.{part}.{kind} is not what the checkpoint holds")
        if packed.shape[1] != 16 * exponents.shape[1]:
            raise Violation(
                f"{part}: {list(packed.shape)} bytes with scales {list(exponents.shape)}; 16 to 1 is needed"
            )
