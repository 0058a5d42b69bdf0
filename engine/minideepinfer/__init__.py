"""mini-DeepInfer: a readable, plugin-based inference engine for DeepSeek-V4.1.

Importing this package imports neither torch nor triton; the names below load what they need when first used.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minideepinfer.config import EngineConfig, ModelConfig
    from minideepinfer.errors import (
        CheckpointError,
        ConfigError,
        MiniDeepInferError,
        OperatorError,
        PluginError,
        RankError,
        RequestError,
        VerificationError,
    )
    from minideepinfer.runtime.generation import Generation
    from minideepinfer.runtime.llm import LLM
    from minideepinfer.runtime.outputs import Chunk, RequestOutput
    from minideepinfer.runtime.params import SamplingParams

_HOMES = {
    "minideepinfer.config": ("EngineConfig", "ModelConfig"),
    "minideepinfer.errors": (
        "CheckpointError",
        "ConfigError",
        "MiniDeepInferError",
        "OperatorError",
        "PluginError",
        "RankError",
        "RequestError",
        "VerificationError",
    ),
    "minideepinfer.runtime.generation": ("Generation",),
    "minideepinfer.runtime.llm": ("LLM",),
    "minideepinfer.runtime.outputs": ("Chunk", "RequestOutput"),
    "minideepinfer.runtime.params": ("SamplingParams",),
}

__version__ = version("mini-deepinfer")

__all__ = [
    "LLM",
    "CheckpointError",
    "Chunk",
    "ConfigError",
    "EngineConfig",
    "Generation",
    "MiniDeepInferError",
    "ModelConfig",
    "OperatorError",
    "PluginError",
    "RankError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "VerificationError",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
