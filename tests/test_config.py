"""Configurations: what is read, and what is refused in which words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import CheckpointError, ConfigError

DATA = Path(__file__).parent / "data"
TINY: dict[str, Any] = json.loads((DATA / "config.tiny.json").read_text())


def changed(path: str, value: Any) -> dict[str, Any]:
    """The tiny config with one value replaced."""
    config = copy.deepcopy(TINY)
    *parents, last = path.split(".")
    table = config
    for name in parents:
        table = table[name]
    table[last] = value
    return config


def test_the_released_schedule() -> None:
    layers = ModelConfig.from_file(DATA / "config.full.json").text_config.layers
    kinds = {layer.layer_id: layer.kind for layer in layers}
    assert [i for i, kind in kinds.items() if kind == "window"] == [0, 1]
    assert [i for i, kind in kinds.items() if kind == "full"] == [2, 8, 14, 20]
    assert [i for i, kind in kinds.items() if kind == "reindex"] == [24, 28, 32, 36]
    assert {layer.kv_source for layer in layers[20:]} == {20}
    assert [layer.index_source for layer in layers[19:30]] == [14, 20, 20, 20, 20, 24, 24, 24, 24, 28, 28]
    assert [layer.layer_id for layer in layers if layer.uses_candidates] == [24, 28, 32, 36]
    assert [layer.layer_id for layer in layers if layer.engram_index is not None] == [1, 14]


REFUSALS = [
    ("text_config.num_experts", 4, "num_experts: unknown key"),
    ("tie", True, "tie: unknown key"),
    ("text_config.o_groups", 3, "num_attention_heads 8 is not divisible by o_groups 3"),
    ("text_config.compress_ratios", [0, 0, 2], "compress_ratios has 3 entries"),
    ("text_config.compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 3, 0, 0, 0], "known ratios are 0, 1 and 2"),
    ("text_config.compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 1, 0], "draft layers"),
    (
        "text_config.compress_ratios",
        [0, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "layer 1 has compress ratio 1 but no",
    ),
    (
        "text_config.compress_ratios",
        [0, 0, 2, 1, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "layer 3 has compress ratio 1, its KV",
    ),
    ("text_config.compress_ratios", [0, 0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0], "source 2 has compress ratio 0"),
    ("text_config.kv_source_layer_ids", [2, 4, 6, 7], "KV sources [7] are not index sources"),
    ("text_config.kv_source_layer_ids", [4, 2, 6], "not strictly ascending"),
    ("text_config.index_source_layer_ids", [2, 4, 6, 99], "names layers [99]"),
    ("text_config.candidate_source_layer_id", 8, "candidate_source_layer_id 8 is not among"),
    ("text_config.candidate_source_layer_id", 4, "not the last KV source"),
    ("text_config.engram_num_embeddings", [462], "engram_num_embeddings has 1 entries"),
    ("text_config.engram_pad_token_id", 512, "outside the vocabulary"),
    ("text_config.qk_rope_head_dim", 15, "is odd"),
    ("text_config.qk_rope_head_dim", 64, "exceeds index_head_dim 32"),
    ("text_config.hidden_size", 130, "not a multiple"),
    ("text_config.num_experts_per_tok", 17, "exceeds n_routed_experts 16"),
    ("text_config.dspark_target_layer_ids", [9, 10, 12], "dspark_target_layer_ids names layers [12]"),
    ("text_config.num_key_value_heads", 2, "num_key_value_heads"),
    ("text_config.sliding_window", 0, "sliding_window"),
    ("text_config.rope_scaling.rope_type", "linear", "rope_type"),
    ("image_token_id", 512, "image_token_id 512 is outside the vocabulary of 512"),
    ("model_type", "deepseek_v4", "model_type"),
    ("quantization_config.expert_dtype", "fp8", "expert_dtype"),
]


@pytest.mark.parametrize(("path", "value", "words"), REFUSALS, ids=[f"{p}={v}" for p, v, _ in REFUSALS])
def test_what_cannot_be_right_is_refused(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_dict(changed(path, value), "some/config.json")
    assert words in str(refusal.value)
    assert str(refusal.value).startswith("some/config.json: ")


def test_a_missing_key_is_named() -> None:
    config = copy.deepcopy(TINY)
    del config["text_config"]["q_lora_rank"]
    with pytest.raises(ConfigError, match=r"text_config\.q_lora_rank"):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[]", "a JSON object is needed")])
def test_a_config_that_is_no_object(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_file(tmp_path)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        ModelConfig.from_file(tmp_path)


def test_engine_config_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('dtype = "float32"\n[cache]\nnum_pages = 7\n[ops]\nattention = "naive"\n')
    (tmp_path / "a.json").write_text('{"dtype": "float32", "cache": {"num_pages": 7}, "ops": {"attention": "naive"}}')
    toml, data = EngineConfig.from_file(tmp_path / "a.toml"), EngineConfig.from_file(tmp_path / "a.json")
    assert toml == data
    assert (toml.cache.num_pages, toml.ops["attention"], toml.replay) == (7, "naive", "full")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", "", "an engine config is .toml or .json"),
        ("a.toml", "dtype = ", "cannot be parsed"),
        ("a.json", "[1]", "a table of settings is needed"),
        ("a.toml", 'dtypo = "float32"', "dtypo: unknown key"),
        ("a.toml", "[cache]\nnum_pages = 0", "cache.num_pages"),
        ("a.toml", 'device = "tpu"', "not one of auto, cpu, cuda, cuda:N"),
        ("a.toml", 'replay = "some"', "replay"),
    ],
)
def test_a_wrong_engine_config_names_the_file(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.from_file(tmp_path / name)
    assert words in str(refusal.value)
    assert name in str(refusal.value)


def test_configs_are_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        EngineConfig().dtype = "bfloat16"  # type: ignore[misc]
