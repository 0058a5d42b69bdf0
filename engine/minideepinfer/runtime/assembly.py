"""From a plan and weights to a model whose layers hold their operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.config import EngineConfig, LayerSchedule, TextConfig
from minideepinfer.model.attention import AttentionLayer
from minideepinfer.model.block import Block
from minideepinfer.model.epilogue import Epilogue
from minideepinfer.model.hyper_connections import HyperConnections, Site
from minideepinfer.model.rope import RotaryTable
from minideepinfer.model.transformer import TextModel
from minideepinfer.model.weights import LayerWeights, ModelWeights
from minideepinfer.operators import CommOperator, HyperConnectionWeights, Phase, RegisteredOperator
from minideepinfer.operators.build import OperatorBuilder
from minideepinfer.operators.placed import Placed
from minideepinfer.operators.plan import Plan, PlannedOperator


def assemble(
    config: TextConfig,
    engine: EngineConfig,
    weights: ModelWeights,
    cache: KVCache,
    plan: Plan,
    builder: OperatorBuilder,
    dtype: torch.dtype,
    comm: CommOperator | None = None,
    keep_weights: bool = False,
    moe_weights: Mapping[int, Mapping[Phase, Any]] | None = None,
) -> TextModel:
    """Build the operators of a plan and give every block its own.

    Args:
        config: the model's facts.
        engine: precision switches.
        weights: of the whole text model, or of its first layers; layers lose their `moe`, of which an operator may have
            made a copy in its own form, before the next one is transformed.
        cache: where layers keep what outlives a step.
        plan: which operator serves what.
        builder: builds each distinct one once.
        dtype: compute dtype.
        comm: used in place of the plan's comm operator, by benchmarks that make the other ranks up.
        keep_weights: leave `moe` in the layers, for tests that look at what was loaded.
        moe_weights: by layer, what the plan's operators made of `moe` earlier; these layers need none.

    Raises:
        PluginError: an operator's code cannot be imported or built.
    """
    parts = _Parts(config, engine, cache, plan, builder, comm, moe_weights or {})
    sites = [parts.sites(w) for w in weights.layers]
    following = [None if w.engram else first for (first, _), w in zip(sites, weights.layers, strict=True)][1:]
    blocks = []
    for index, (own, behind) in enumerate(zip(sites, [*following, None], strict=True)):
        blocks.append(parts.block(config.layers[index], weights.layers[index], own, behind))
        if not keep_weights:
            weights.layers[index] = replace(weights.layers[index], moe=None)
    return TextModel(config, weights, blocks, parts.mixing, parts.comm, parts.epilogue, dtype)


class _Parts:
    def __init__(
        self,
        config: TextConfig,
        engine: EngineConfig,
        cache: KVCache,
        plan: Plan,
        builder: OperatorBuilder,
        comm: CommOperator | None,
        moe_weights: Mapping[int, Mapping[Phase, Any]],
    ) -> None:
        self.config = config
        self.engine = engine
        self.cache = cache
        self.plan = plan
        self.builder = builder
        self.moe_weights = moe_weights
        # Ranks talk in the same way whatever rows they have: one comm operator for both phases.
        self.comm = comm or self._operators("comm", None)[Phase.PREFILL]
        self.mixing = HyperConnections(self._operators("residual", None))
        self.epilogue = Epilogue(
            self._operators("epilogue", None),
            round_kv=engine.kv_quantization == "released",
            round_activations=engine.activation_quantization == "released",
        )
        self._ropes: dict[bool, RotaryTable] = {}

    def sites(self, weights: LayerWeights) -> tuple[Site, Site]:
        """The attention site and the MoE site of a block."""
        return self._site(weights.hc_attn, weights.attn_norm), self._site(weights.hc_ffn, weights.ffn_norm)

    def block(
        self, layer: LayerSchedule, weights: LayerWeights, sites: tuple[Site, Site], following: Site | None
    ) -> Block:
        """A block; `following` is the attention site of the next one, if that follows at once."""
        moe = self._operators("moe", layer.layer_id)
        return Block(
            layer=layer,
            weights=replace(weights, moe=None),
            config=self.config,
            attention=self._attention(layer, weights),
            moe=moe,
            moe_weights=self.moe_weights.get(layer.layer_id)
            or self._transformed("moe", layer.layer_id, moe, weights.moe),
            comm=self.comm,
            mixing=self.mixing,
            attention_site=sites[0],
            moe_site=sites[1],
            following=following,
            epilogue=self.epilogue,
        )

    def _attention(self, layer: LayerSchedule, weights: LayerWeights) -> AttentionLayer:
        return AttentionLayer(
            layer,
            weights.attention,
            self.config,
            self.cache,
            self._operators("attention", layer.layer_id),
            self._operators("indexer", layer.layer_id) if layer.is_index_source else {},
            self.epilogue,
            self._rope(layer.compress_ratio, weights.attention.wq_a.device),
        )

    def _rope(self, ratio: int, device: torch.device) -> RotaryTable:
        """One table for all layers of its kind, so that a step computes its angles once."""
        return self._ropes.setdefault(ratio == 0, RotaryTable.for_ratio(self.config, ratio, device))

    def _site(self, weights: HyperConnectionWeights, norm: Tensor) -> Site:
        return Site(self._transformed("residual", None, self.mixing.operators, weights), norm)

    def _transformed(
        self, family: str, layer_id: int | None, operators: Mapping[Phase, Any], weights: Any
    ) -> dict[Phase, Any]:
        """What each phase's operator makes of the weights; made once where both phases have the same operator."""
        made: dict[tuple[RegisteredOperator, str], Any] = {}
        served: dict[Phase, Any] = {}
        for phase, operator in operators.items():
            planned = self.plan.operators[family, layer_id, phase]
            key = (planned.registered, planned.options.model_dump_json())
            if key not in made:
                made[key] = operator.transform_weights(weights)
            served[phase] = made[key]
        return served

    def _operators(self, family: str, layer_id: int | None) -> dict[Phase, Any]:
        return {phase: self._placed(self.plan.operators[family, layer_id, phase], layer_id, phase) for phase in Phase}

    def _placed(self, planned: PlannedOperator, layer_id: int | None, phase: Phase) -> Placed:
        place = phase.value if layer_id is None else f"layer {layer_id}, {phase}"
        return Placed(self.builder.build(planned), f"{planned.registered.title} in {place}")
