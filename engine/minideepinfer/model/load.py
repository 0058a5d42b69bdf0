"""Reading the text model's weights from a checkpoint, block by block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minideepinfer.checkpoint import Checkpoint
from minideepinfer.checkpoint.partition import Partition
from minideepinfer.config import EngramConfig, LayerSchedule
from minideepinfer.model.weights import (
    AttentionWeights,
    CompressorWeights,
    EngramWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
)
from minideepinfer.operators import HyperConnectionWeights, MoeWeights, SharedExpert


class WeightLoader:
    """Turns tensors of the release into the form of `minideepinfer.model.weights`.

    Experts and Engram tables are this rank's part; all else is read by every rank.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        engram: EngramConfig,
        part: Partition = Partition(),  # noqa: B008 (frozen)
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config.text_config
        self.dtype = dtype
        self.device = device
        self.engram = engram
        self.part = part

    def load(
        self, progress: Callable[[int, int], None] = lambda done, total: None, num_layers: int | None = None
    ) -> ModelWeights:
        """Read everything the text model needs.

        Args:
            progress: called with blocks done and blocks in all.
            num_layers: first blocks that are read; None = all.

        Raises:
            CheckpointError: a tensor is damaged; nothing is kept.
        """
        embed = self._stored("embed.weight")
        layers = []
        wanted = self.config.layers[:num_layers]
        for layer in wanted:
            progress(layer.layer_id, len(wanted))
            layers.append(self._layer(layer))
        progress(len(wanted), len(wanted))
        return ModelWeights(embed, self._matrix("head.weight"), self._float("norm.weight"), layers)

    def _stored(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(self.device)

    def _float(self, name: str) -> Tensor:
        return self._stored(name).float()

    def _matrix(self, name: str) -> Tensor:
        return self._stored(name).to(self.dtype)

    def _dense(self, name: str) -> Tensor:
        return self.checkpoint.dense(name, self.dtype, self.device)

    def _layer(self, layer: LayerSchedule) -> LayerWeights:
        prefix = f"layers.{layer.layer_id}"
        return LayerWeights(
            attn_norm=self._float(f"{prefix}.attn_norm.weight"),
            ffn_norm=self._float(f"{prefix}.ffn_norm.weight"),
            hc_attn=self._hyper_connection(f"{prefix}.hc_attn"),
            hc_ffn=self._hyper_connection(f"{prefix}.hc_ffn"),
            attention=self._attention(f"{prefix}.attn", layer),
            moe=self.moe(layer.layer_id),
            engram=None if layer.engram_index is None else self._engram(f"{prefix}.engram"),
        )

    def _hyper_connection(self, prefix: str) -> HyperConnectionWeights:
        return HyperConnectionWeights(*(self._float(f"{prefix}_{part}") for part in ("fn", "base", "scale")))

    def _attention(self, prefix: str, layer: LayerSchedule) -> AttentionWeights:
        wo_a = self._dense(f"{prefix}.wo_a")
        return AttentionWeights(
            wq_a=self._dense(f"{prefix}.wq_a"),
            q_norm=self._float(f"{prefix}.q_norm.weight"),
            wq_b=self._dense(f"{prefix}.wq_b"),
            wkv=self._dense(f"{prefix}.wkv"),
            kv_norm=self._float(f"{prefix}.kv_norm.weight"),
            sink=self._float(f"{prefix}.attn_sink"),
            wo_a=wo_a.unflatten(0, (self.config.o_groups, self.config.o_lora_rank)),
            wo_b=self._dense(f"{prefix}.wo_b"),
            compressor=self._compressor(prefix, layer) if layer.is_kv_source else None,
            indexer=self._indexer(f"{prefix}.indexer") if layer.is_index_source else None,
        )

    def _compressor(self, prefix: str, layer: LayerSchedule) -> CompressorWeights:
        parts = ("wkv", "wgate") if layer.compress_ratio > 1 else ("wkv",)
        return CompressorWeights(
            wkv=torch.cat([self._matrix(f"{prefix}.compressor.{part}.weight") for part in parts]),
            norm=self._float(f"{prefix}.compressor.norm.weight"),
            wk=self._matrix(f"{prefix}.indexer.wk.weight"),
            k_norm=self._float(f"{prefix}.indexer.k_norm.weight"),
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(self._dense(f"{prefix}.wq_b"), self._matrix(f"{prefix}.weights_proj.weight"))

    def moe(self, layer_id: int) -> MoeWeights:
        """Read gate and experts of one block."""
        prefix = f"layers.{layer_id}.ffn"
        shared, experts = f"{prefix}.shared_experts", self.part.experts(self.config.n_routed_experts)
        return MoeWeights(
            gate=self._stored(f"{prefix}.gate.weight"),
            gate_bias=self._float(f"{prefix}.gate.bias"),
            experts=self.checkpoint.experts(f"{prefix}.experts", experts, self.device),
            shared=SharedExpert(self._dense(f"{shared}.w1"), self._dense(f"{shared}.w3"), self._dense(f"{shared}.w2"))
            if self.config.n_shared_experts
            else None,
        )

    def _engram(self, prefix: str) -> EngramWeights:
        place, num_rows = self.engram.placement, self.checkpoint.num_rows(f"{prefix}.embed.weight")
        rows = self.part.rows(num_rows)
        return EngramWeights(
            table=self.checkpoint.row_table(f"{prefix}.embed.weight", place, self.device, rows),
            table_scale=self.checkpoint.row_table(f"{prefix}.embed.scale", place, self.device, rows),
            wkv=self._dense(f"{prefix}.wkv"),
            gate_weight=self._float(f"{prefix}.q_weight") * self._float(f"{prefix}.k_weight"),
            rows_per_rank=self.part.rows_per_rank(num_rows),
        )
