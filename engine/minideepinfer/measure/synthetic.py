"""Random weights of one rank, made on the device in the form in which the engine holds them; no checkpoint is needed.

Matrices are scaled by their fan-in, so that activations keep their size through all layers; experts are random packed
MXFP4 bytes, never decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minideepinfer.config import LayerSchedule, TextConfig
from minideepinfer.model.weights import (
    AttentionWeights,
    CompressorWeights,
    EngramWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
)
from minideepinfer.operators import HyperConnectionWeights, MoeWeights, PackedExperts, SharedExpert

_E2M1_RMS = 2.93
"""Root mean square of the 16 values of a random FP4 code."""


@dataclass(frozen=True)
class Share:
    """How much of the model one rank holds.

    Attributes:
        num_layers: first layers of the model.
        num_experts: routed experts a layer.
        engram_rows: rows of each Engram table.
        rank: which rank, and so which experts.
    """

    num_layers: int
    num_experts: int
    engram_rows: int
    rank: int = 0


class SyntheticWeights:
    """Makes the weights of a rank; the same seed gives the same weights on the same device."""

    def __init__(
        self, config: TextConfig, share: Share, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        self.config = config
        self.share = share
        self.dtype = dtype
        self.device = device
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)

    def make(self) -> ModelWeights:
        """All weights of the rank."""
        config = self.config
        layers = [self._layer(layer) for layer in config.layers[: self.share.num_layers]]
        vocabulary = (config.vocab_size, config.hidden_size)
        head = self.normal(*vocabulary, gain=config.hidden_size**-0.5)
        return ModelWeights(self.normal(*vocabulary), head, self._ones(config.hidden_size), layers)

    def normal(self, *shape: int, gain: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of standard deviation `gain`, made in place."""
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return values.normal_(0.0, gain, generator=self.generator)

    def _bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self.generator)

    def _matrix(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.normal(rows, columns, gain=columns**-0.5, dtype=dtype)

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)

    def _layer(self, layer: LayerSchedule) -> LayerWeights:
        hidden = self.config.hidden_size
        return LayerWeights(
            attn_norm=self._ones(hidden),
            ffn_norm=self._ones(hidden),
            hc_attn=self._hyper_connection(),
            hc_ffn=self._hyper_connection(),
            attention=self._attention(layer),
            moe=self.moe(layer.layer_id),
            engram=None if layer.engram_index is None else self._engram(),
        )

    def _hyper_connection(self) -> HyperConnectionWeights:
        streams = self.config.hc_mult
        rows = 2 * streams + streams * streams
        base = torch.cat([torch.zeros(2 * streams), 1.5 * torch.eye(streams).flatten()]).to(self.device)
        return HyperConnectionWeights(
            self._matrix(rows, streams * self.config.hidden_size, torch.float32), base, self._ones(3)
        )

    def _attention(self, layer: LayerSchedule) -> AttentionWeights:
        config, hidden = self.config, self.config.hidden_size
        heads = config.num_attention_heads
        wo_a = self._matrix(config.o_groups * config.o_lora_rank, heads * config.head_dim // config.o_groups)
        return AttentionWeights(
            wq_a=self._matrix(config.q_lora_rank, hidden),
            q_norm=self._ones(config.q_lora_rank),
            wq_b=self._matrix(heads * config.head_dim, config.q_lora_rank),
            wkv=self._matrix(config.head_dim, hidden),
            kv_norm=self._ones(config.head_dim),
            sink=self.normal(heads, dtype=torch.float32),
            wo_a=wo_a.unflatten(0, (config.o_groups, config.o_lora_rank)),
            wo_b=self._matrix(hidden, config.o_groups * config.o_lora_rank),
            compressor=self._compressor(layer) if layer.is_kv_source else None,
            indexer=self._indexer() if layer.is_index_source else None,
        )

    def _compressor(self, layer: LayerSchedule) -> CompressorWeights:
        config, parts = self.config, 2 if layer.compress_ratio > 1 else 1
        return CompressorWeights(
            wkv=self._matrix(parts * config.head_dim, config.hidden_size),
            norm=self._ones(config.head_dim),
            wk=self._matrix(config.index_head_dim, config.head_dim),
            k_norm=self._ones(config.index_head_dim),
        )

    def _indexer(self) -> IndexerWeights:
        config = self.config
        queries = self._matrix(config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        return IndexerWeights(queries, self._matrix(config.index_n_heads, config.hidden_size))

    def moe(self, layer_id: int) -> MoeWeights:
        """Gate and experts of one layer; the same whenever they are made, experts of each rank its own."""
        others = self.generator
        try:
            self.generator = self._generator_of(layer_id, 0)
            return self._moe(self._generator_of(layer_id, 1 + self.share.rank))
        finally:
            self.generator = others

    def _generator_of(self, layer_id: int, part: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + 1 + layer_id + 1000 * part)

    def _moe(self, of_experts: torch.Generator) -> MoeWeights:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.moe_intermediate_size
        shared = None
        if config.n_shared_experts:
            shared = SharedExpert(self._matrix(inner, hidden), self._matrix(inner, hidden), self._matrix(hidden, inner))
        gate = self._matrix(config.n_routed_experts, hidden, torch.bfloat16)
        self.generator = of_experts
        return MoeWeights(gate, torch.zeros(config.n_routed_experts, device=self.device), self._experts(), shared)

    def _experts(self) -> PackedExperts:
        experts, hidden, inner = self.share.num_experts, self.config.hidden_size, self.config.moe_intermediate_size
        return PackedExperts(
            w13=self._bytes(experts, 2, inner, hidden // 2),
            w13_scale=self._exponents(experts, 2, inner, hidden // 32, fan_in=hidden),
            w2=self._bytes(experts, hidden, inner // 2),
            w2_scale=self._exponents(experts, hidden, inner // 32, fan_in=inner),
            expert_start=self.share.rank * experts,
        )

    def _exponents(self, *shape: int, fan_in: int) -> Tensor:
        """E8M0 bytes around the power of two that gives random codes a standard deviation of fan_in ** -0.5."""
        middle = 127 + round(math.log2(fan_in**-0.5 / _E2M1_RMS))
        return self._bytes(*shape, low=middle - 1, high=middle + 2)

    def _engram(self) -> EngramWeights:
        config, rows = self.config, self.share.engram_rows
        columns = config.engram_columns
        return EngramWeights(
            table=self._bytes(rows, config.engram_head_dim, high=127),  # 127 and 255 are E4M3's NaN
            table_scale=self._bytes(rows, config.engram_head_dim // 32, low=119, high=121),
            wkv=self._matrix((config.hc_mult + 1) * config.hidden_size, columns * config.engram_head_dim),
            gate_weight=self._ones(config.hc_mult, config.hidden_size),
            rows_per_rank=rows,
        )
