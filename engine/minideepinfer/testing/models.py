"""Small checkpoints that the kit makes for runs end to end: one of few numbers, one with the release's head sizes."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from minideepinfer.checkpoint.make_tiny import DEFAULT_CONFIG, make_tiny

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_topk": 6,
    "candidate_topk_blocks": 3,
    "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "engram_layer_ids": [0],
    "engram_num_embeddings": [462],
    "engram_compressed_vocab_size": 64,
    "num_nextn_predict_layers": 0,
    "dspark_noise_token_id": 95,
}
"""A window layer with Engram; ratio 2, and one that reuses its selection; the candidate source; one behind it."""

MODELS: dict[str, dict[str, Any]] = {
    "small": _SMALL,
    "middle": _SMALL | {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 8, "index_n_heads": 16},
    "wide": _SMALL
    | {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_attention_heads": 16,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 64,
        "candidate_block_size": 8,
    },
}
"""Models that an operator may be run in, the wanted one first; the last one has the release's head sizes."""


def model_config(name: str, block: tuple[int, int] = (32, 32)) -> dict[str, Any]:
    """The `config.json` of a model; dense FP8 weights have one scale for each `block` of rows x columns."""
    config: dict[str, Any] = json.loads(DEFAULT_CONFIG.read_text(encoding="utf-8"))
    config["image_token_id"] = 94
    config["text_config"] |= MODELS[name]
    config["quantization_config"]["weight_block_size"] = list(block)
    return config


def checkpoint(name: str, block: tuple[int, int] = (32, 32)) -> Path:
    """The checkpoint of a model, written once for this process and removed when it ends."""
    return _made(name, block)


@cache
def _made(name: str, block: tuple[int, int]) -> Path:
    directory = _folder()
    (directory / "config.json").write_text(json.dumps(model_config(name, block)), encoding="utf-8")
    make_tiny(directory / "checkpoint", directory / "config.json")
    return directory / "checkpoint"


def altered_copy(path: Path) -> Path:
    """A copy of a checkpoint that may be changed."""
    return Path(shutil.copytree(path, _folder() / "checkpoint"))


def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="minideepinfer-kit-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
