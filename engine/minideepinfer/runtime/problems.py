"""What a model asks of its operators on a given machine, without loading anything."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from minideepinfer.checkpoint.partition import Partition
from minideepinfer.config import EngineConfig, LayerSchedule, ModelConfig
from minideepinfer.errors import ConfigError
from minideepinfer.operators import (
    TOKEN_INDICES,
    AttentionProblem,
    CommProblem,
    EpilogueProblem,
    IndexerProblem,
    MoeProblem,
    Phase,
    Problem,
    ResidualProblem,
)

if TYPE_CHECKING:
    import torch


def resolve_device(engine_config: EngineConfig) -> torch.device:
    """The device that the config names; `auto` is CUDA where there is one. Of several ranks each has its own.

    Raises:
        ConfigError: this machine has no such device, or one device is named for several ranks.
    """
    import torch

    name, ranks = engine_config.device, engine_config.parallel.data
    if ranks > 1 and ":" in name:
        raise ConfigError(f"device: {name} is one device for {ranks} ranks; with `cuda` each rank takes its own")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if ranks > 1 and device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device: {device} is not here, this machine has {count} CUDA devices; cpu always works")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability as `(major, minor)`, None on CPU."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def resolve_dtype(engine_config: EngineConfig, device_type: str) -> str:
    """Compute dtype, `float32` or `bfloat16`; `auto` is float32 on CPU and bfloat16 on CUDA."""
    if engine_config.dtype != "auto":
        return engine_config.dtype
    return "bfloat16" if device_type == "cuda" else "float32"


def resolve_cache_layout(engine_config: EngineConfig, dtype: str) -> str:
    """Cache layout; `auto` stores float32 as `float32` and bfloat16 as `bf16`."""
    if engine_config.cache.layout != "auto":
        return engine_config.cache.layout
    return {"float32": "float32", "bfloat16": "bf16"}[dtype]


def layer_problems(
    model_config: ModelConfig, engine_config: EngineConfig, device_type: str, capability: tuple[int, int] | None
) -> dict[tuple[str, int | None, Phase], Problem]:
    """The problem of every operator call, by family, layer (None for comm, residual and epilogue) and phase.

    Args:
        model_config: the checkpoint's facts.
        engine_config: precision, cache layout and ranks.
        device_type: `cpu` or `cuda`.
        capability: see `device_capability`.

    Raises:
        ConfigError: the ranks cannot share the experts evenly.
    """
    problems: dict[tuple[str, int | None, Phase], Problem] = {}
    for phase in Phase:
        facts = _Facts(model_config, engine_config, phase, device_type, capability)
        problems["comm", None, phase] = facts.comm()
        problems["residual", None, phase] = facts.residual()
        problems["epilogue", None, phase] = facts.epilogue()
        for layer in model_config.text_config.layers:
            problems["attention", layer.layer_id, phase] = facts.attention(layer)
            problems["moe", layer.layer_id, phase] = facts.moe()
            if layer.is_index_source:
                problems["indexer", layer.layer_id, phase] = facts.indexer(layer)
    return problems


class _Facts:
    """Makes the problems of one phase."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        phase: Phase,
        device_type: str,
        capability: tuple[int, int] | None,
    ) -> None:
        self.text = model_config.text_config
        self.engine = engine_config
        dtype = resolve_dtype(engine_config, device_type)
        self.shared: dict[str, Any] = {
            "phase": phase,
            "device": device_type,
            "capability": capability,
            "dtype": dtype,
            "kv_quantization": engine_config.kv_quantization,
            "activation_quantization": engine_config.activation_quantization,
        }
        self.paged: dict[str, Any] = {
            "page_tokens": engine_config.cache.page_tokens,
            "cache_layout": resolve_cache_layout(engine_config, dtype),
            "selection_layout": TOKEN_INDICES,
        }

    def attention(self, layer: LayerSchedule) -> AttentionProblem:
        return AttentionProblem(
            num_heads=self.text.num_attention_heads,
            head_dim=self.text.head_dim,
            rope_dim=self.text.qk_rope_head_dim,
            sliding_window=self.text.sliding_window,
            compress_ratio=layer.compress_ratio,
            index_topk=self.text.index_topk,
            **self.paged,
            **self.shared,
        )

    def indexer(self, layer: LayerSchedule) -> IndexerProblem:
        return IndexerProblem(
            num_heads=self.text.index_n_heads,
            head_dim=self.text.index_head_dim,
            compress_ratio=layer.compress_ratio,
            topk=self.text.index_topk,
            emits_candidates=layer.is_candidate_source,
            uses_candidates=layer.uses_candidates,
            candidate_topk_blocks=self.text.candidate_topk_blocks,
            candidate_block_size=self.text.candidate_block_size,
            **self.paged,
            **self.shared,
        )

    def moe(self) -> MoeProblem:
        ranks = self.engine.parallel.expert
        return MoeProblem(
            hidden_size=self.text.hidden_size,
            intermediate_size=self.text.moe_intermediate_size,
            num_experts=self.text.n_routed_experts,
            num_local_experts=len(Partition(size=ranks).experts(self.text.n_routed_experts)),
            topk=self.text.num_experts_per_tok,
            num_shared_experts=self.text.n_shared_experts,
            routed_scaling=self.text.routed_scaling_factor,
            swiglu_limit=self.text.swiglu_limit,
            world_size=ranks,
            **self.shared,
        )

    def comm(self) -> CommProblem:
        return CommProblem(
            hidden_size=self.text.hidden_size,
            num_experts=self.text.n_routed_experts,
            world_size=self.engine.parallel.expert,
            **self.shared,
        )

    def residual(self) -> ResidualProblem:
        return ResidualProblem(
            num_streams=self.text.hc_mult,
            hidden_size=self.text.hidden_size,
            sinkhorn_iterations=self.text.hc_sinkhorn_iters,
            rms_norm_eps=self.text.rms_norm_eps,
            hc_eps=self.text.hc_eps,
            **self.shared,
        )

    def epilogue(self) -> EpilogueProblem:
        text = self.text
        widths = {text.q_lora_rank, text.head_dim, text.index_head_dim, text.hidden_size}
        if self.engine.activation_quantization == "released":
            widths |= {text.o_groups * text.o_lora_rank, text.engram_columns * text.engram_head_dim}
        return EpilogueProblem(
            widths=tuple(sorted(widths)),
            rope_dim=text.qk_rope_head_dim,
            rms_norm_eps=text.rms_norm_eps,
            **self.shared,
        )
