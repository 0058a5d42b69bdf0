"""What a model asks of its operators, and the defaults that fit a machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError
from minideepinfer.operators import Phase
from minideepinfer.runtime.problems import layer_problems, resolve_cache_layout, resolve_device, resolve_dtype

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
TINY = ModelConfig.from_file(directory_of("tiny"))


def problems(config: EngineConfig, device: str = "cpu") -> dict[Any, Any]:
    return layer_problems(TINY, config, device, None)


def test_problems_cover_every_call_of_the_model() -> None:
    found = problems(EngineConfig())
    layers = TINY.text_config.num_hidden_layers
    for phase in Phase:
        assert {layer for family, layer, at in found if family == "attention" and at == phase} == set(range(layers))
        assert {layer for family, layer, at in found if family == "moe" and at == phase} == set(range(layers))
        assert {layer for family, layer, at in found if family == "indexer" and at == phase} == {2, 4, 5, 7}
        assert {("comm", None, phase), ("residual", None, phase), ("epilogue", None, phase)} <= set(found)
    assert all(problem.phase is phase for (_, _, phase), problem in found.items())
    assert [found["attention", layer, DECODE].compress_ratio for layer in range(6)] == [0, 0, 2, 2, 2, 1]
    source, later = found["indexer", 5, PREFILL], found["indexer", 7, PREFILL]
    assert (source.emits_candidates, source.uses_candidates) == (True, False)
    assert (later.emits_candidates, later.uses_candidates) == (False, True)
    assert found["moe", 0, PREFILL].num_local_experts == found["moe", 0, PREFILL].num_experts == 8


@pytest.mark.parametrize(
    ("device", "settings", "dtype", "layout"),
    [
        ("cpu", {}, "float32", "float32"),
        ("cuda", {}, "bfloat16", "bf16"),
        ("cpu", {"dtype": "bfloat16"}, "bfloat16", "bf16"),
        ("cuda", {"dtype": "float32"}, "float32", "float32"),
        ("cpu", {"cache": {"layout": "bf16"}}, "float32", "bf16"),
    ],
)
def test_auto_dtype_and_layout(device: str, settings: dict[str, Any], dtype: str, layout: str) -> None:
    config = EngineConfig(**settings)
    assert resolve_dtype(config, device) == dtype
    assert resolve_cache_layout(config, dtype) == layout
    found = problems(config, device)["attention", 2, DECODE]
    assert (found.device, found.dtype, found.cache_layout) == (device, dtype, layout)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineConfig()) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device: cuda is not here.*0 CUDA devices"):
        resolve_device(EngineConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(EngineConfig()) == torch.device("cuda", 0)
    assert resolve_device(EngineConfig(device="cuda:1")) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"cuda:2 is not here.*2 CUDA devices"):
        resolve_device(EngineConfig(device="cuda:2"))
