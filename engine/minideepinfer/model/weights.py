"""The weights of the text model as they lie in memory. Vectors and mHC in float32, matrices in the compute dtype."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minideepinfer.operators import HyperConnectionWeights, MoeWeights


@dataclass(frozen=True, eq=False)
class CompressorWeights:
    """Global entries and index keys of a KV source.

    Attributes:
        wkv: `[head_dim, H]`; at ratio 2 `[2 * head_dim, H]`, the values' rows above the gates'.
        norm: float32 `[head_dim]`.
        wk: `[index_head_dim, head_dim]`.
        k_norm: float32 `[index_head_dim]`.
    """

    wkv: Tensor
    norm: Tensor
    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """Index queries of an index source: `wq_b` `[heads * index_head_dim, q_lora]`, `weights_proj` `[heads, H]`."""

    wq_b: Tensor
    weights_proj: Tensor


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Projections of one attention layer.

    Attributes:
        wq_a: `[q_lora, H]`; q_norm: float32 `[q_lora]`; wq_b: `[heads * head_dim, q_lora]`.
        wkv: `[head_dim, H]`; kv_norm: float32 `[head_dim]`.
        sink: float32 `[heads]`.
        wo_a: `[groups, o_lora, heads / groups * head_dim]`; wo_b: `[H, groups * o_lora]`.
        compressor: on KV sources.
        indexer: on index sources.
    """

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    sink: Tensor
    wo_a: Tensor
    wo_b: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, eq=False)
class EngramWeights:
    """One Engram injection. S streams.

    Attributes:
        table: uint8 `[rows, engram_head_dim]` E4M3 bytes, on device, host or disk.
        table_scale: uint8 `[rows, engram_head_dim / 32]`, beside it.
        rows_per_rank: rows of each rank's shard, of which the last ranks may have fewer; rank 0 has the first.
        wkv: `[(S + 1) * H, columns * engram_head_dim]`.
        gate_weight: float32 `[S, H]`, the product of the weights of stream and key.
    """

    table: Tensor
    table_scale: Tensor
    wkv: Tensor
    gate_weight: Tensor
    rows_per_rank: int


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One block; `moe` is None once an operator has brought it into its own form."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperConnectionWeights
    hc_ffn: HyperConnectionWeights
    attention: AttentionWeights
    moe: MoeWeights | None
    engram: EngramWeights | None


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The text model: `embed` `[vocab, H]` as stored, `head` `[vocab, H]`, `norm` float32 `[H]`; its blocks."""

    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: list[LayerWeights]
