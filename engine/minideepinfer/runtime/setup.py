"""What two configurations and this machine come to: a plan before any weight is read, then cache and model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.cache.layouts import CacheLayout, cache_layout
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.model.transformer import TextModel
from minideepinfer.model.weights import ModelWeights
from minideepinfer.operators import CommOperator, NoClock, Problem, StageClock
from minideepinfer.operators.build import OperatorBuilder
from minideepinfer.operators.plan import Plan
from minideepinfer.operators.registry import OperatorRegistry, load_registry
from minideepinfer.operators.resolve import resolve
from minideepinfer.runtime.assembly import assemble
from minideepinfer.runtime.problems import (
    device_capability,
    layer_problems,
    resolve_cache_layout,
    resolve_device,
    resolve_dtype,
)


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything decided before weights are read.

    Attributes:
        model_config: the model's facts.
        engine_config: how to run it.
        device: where.
        dtype_name: compute dtype, `float32` or `bfloat16`.
        layout: of the caches.
        plan: which operator serves which layer and phase.
    """

    model_config: ModelConfig
    engine_config: EngineConfig
    device: torch.device
    dtype_name: str
    layout: CacheLayout
    plan: Plan

    @classmethod
    def of(
        cls,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        registry: OperatorRegistry | None = None,
        adjust: Callable[[Problem], Problem] = lambda problem: problem,
    ) -> Setup:
        """Decide.

        Args:
            model_config: the model's facts.
            engine_config: how to run it.
            registry: operators to choose from; None = those of all installed plugins.
            adjust: changes problems before operators are chosen, for benchmarks of a part of something larger.

        Raises:
            OperatorError: a chosen operator cannot serve the model.
            ConfigError: the machine lacks the device.
        """
        device = resolve_device(engine_config)
        dtype_name = resolve_dtype(engine_config, device.type)
        problems = layer_problems(model_config, engine_config, device.type, device_capability(device))
        adjusted = {key: adjust(problem) for key, problem in problems.items()}
        return cls(
            model_config=model_config,
            engine_config=engine_config,
            device=device,
            dtype_name=dtype_name,
            layout=cache_layout(resolve_cache_layout(engine_config, dtype_name)),
            plan=resolve(registry or load_registry(engine_config.plugins.ignore), engine_config, adjusted),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    def build(
        self,
        weights: ModelWeights,
        clock: StageClock | None = None,
        comm: CommOperator | None = None,
        keep_weights: bool = False,
    ) -> tuple[KVCache, TextModel]:
        """Allocate the cache and assemble the model; see `runtime.assembly.assemble`.

        Raises:
            ConfigError: the cache does not fit.
            PluginError: an operator's code cannot be imported or built.
        """
        text, engine = self.model_config.text_config, self.engine_config
        cache = KVCache(text, engine.cache, self.layout, self.device)
        builder = OperatorBuilder(self.device, clock or NoClock())
        model = assemble(text, engine, weights, cache, self.plan, builder, self.dtype, comm, keep_weights)
        return cache, model
