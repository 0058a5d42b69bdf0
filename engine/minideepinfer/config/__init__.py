"""Configuration: `ModelConfig` is the released `config.json`, `EngineConfig` is how to run it."""

from minideepinfer.config.engine import (
    CacheConfig,
    Choice,
    EngineConfig,
    EngramConfig,
    OperatorChoice,
    OperatorRule,
    ParallelConfig,
    PhaseChoice,
    PluginsConfig,
)
from minideepinfer.config.model import ModelConfig, QuantizationSpec, RopeScaling, TextConfig, VisionConfig
from minideepinfer.config.schedule import LayerSchedule

__all__ = [
    "CacheConfig",
    "Choice",
    "EngineConfig",
    "EngramConfig",
    "LayerSchedule",
    "ModelConfig",
    "OperatorChoice",
    "OperatorRule",
    "ParallelConfig",
    "PhaseChoice",
    "PluginsConfig",
    "QuantizationSpec",
    "RopeScaling",
    "TextConfig",
    "VisionConfig",
]
