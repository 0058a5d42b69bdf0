"""The released layout: every tensor's name, shape and dtype, derived from the config (spec 2.1). Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from minideepinfer.config import LayerSchedule, ModelConfig, TextConfig
from minideepinfer.errors import ConfigError

DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
"""Bytes per element of the safetensors dtypes that the text model and the draft use."""

KINDS = (
    "embedding",
    "head",
    "attention",
    "indexer",
    "compressor",
    "experts",
    "shared experts",
    "gate",
    "hyper connections",
    "norms",
    "engram",
    "engram tables",
    "draft",
    "vision",
)
"""What a tensor belongs to, in the order of reports."""

SKIPPED_KINDS = ("draft", "vision")
"""Known, checked as far as the layout says, and not read by the text model."""

MAX_EXPERTS = 1_000_000
"""Experts of all layers; a config beyond it is damaged, and listing its tensors would not end."""

VISION_PREFIXES = ("vision.", "aligner.", "image_")

ROW_GROUP = 32
"""Logical columns per scale of experts and Engram tables; `weight_block_size` is about dense FP8 only (spec 1.1)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the layout says about one tensor.

    Attributes:
        name: as in the index.
        shape: as stored; a row of FP4 experts has two columns per byte.
        dtype: a key of `DTYPE_BYTES`.
        kind: one of `KINDS`.
        block: of a scale tensor: rows and logical columns of its weight per scale; None for all others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    block: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the text model and the draft, in the order of the forward pass.

    For the released config: 95,819 tensors, 509,315,486,040 bytes. Vision tensors are known by name only, see
    `is_vision`.

    Raises:
        ConfigError: the config asks for more expert tensors than any checkpoint has.
    """
    text, block = config.text_config, config.quantization_config.weight_block_size
    num_experts = text.num_hidden_layers * text.n_routed_experts
    num_experts += text.num_nextn_predict_layers * text.dspark_n_routed_experts
    if num_experts > MAX_EXPERTS:
        raise ConfigError(f"config.json describes {num_experts} experts; at most {MAX_EXPERTS} can be listed")
    return {spec.name: spec for spec in _tensors(text, block)}


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower, the aligner or the image delimiters."""
    return name.startswith(VISION_PREFIXES)


def scale_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a `[rows, columns]` weight; blocks at the edges may be ragged."""
    return -(-rows // block[0]), -(-columns // block[1])


def _tensors(c: TextConfig, block: tuple[int, int]) -> Iterator[TensorSpec]:
    yield TensorSpec("embed.weight", (c.vocab_size, c.hidden_size), "BF16", "embedding")
    for layer in c.layers:
        yield from _Block(c, block, f"layers.{layer.layer_id}", "").tensors(c.n_routed_experts, layer)
    yield TensorSpec("norm.weight", (c.hidden_size,), "BF16", "norms")
    yield TensorSpec("head.weight", (c.vocab_size, c.hidden_size), "BF16", "head")
    for index in range(c.num_nextn_predict_layers):
        yield from _Block(c, block, f"mtp.{index}", "draft").draft_tensors(index)


class _Block:
    """The tensors below one prefix; `kind` overrides the kind of all of them."""

    def __init__(self, config: TextConfig, block: tuple[int, int], prefix: str, kind: str) -> None:
        self.config = config
        self.block = block
        self.prefix = prefix
        self.kind = kind

    def tensors(self, num_experts: int, layer: LayerSchedule | None) -> Iterator[TensorSpec]:
        if layer and layer.engram_index is not None:
            yield from self._engram(self.config.engram_num_embeddings[layer.engram_index])
        yield from self._hyper_connection("hc_attn")
        yield self._norm("attn_norm", self.config.hidden_size)
        yield from self._attention()
        if layer and layer.is_kv_source:
            yield from self._compressor(pools=layer.compress_ratio > 1)
        if layer and layer.is_index_source:
            yield from self._indexer()
        yield from self._hyper_connection("hc_ffn")
        yield self._norm("ffn_norm", self.config.hidden_size)
        yield from self._moe(num_experts)

    def draft_tensors(self, index: int) -> Iterator[TensorSpec]:
        c = self.config
        if index == 0:
            yield from self._fp8("main_proj", c.hidden_size, c.hidden_size * len(c.dspark_target_layer_ids), "draft")
            yield self._norm("main_norm", c.hidden_size)
        yield from self.tensors(c.dspark_n_routed_experts, None)
        if index == c.num_nextn_predict_layers - 1:
            yield self._norm("norm", c.hidden_size)
            yield self._bf16("markov_head.embed.weight", (c.vocab_size, c.dspark_markov_rank), "draft")
            yield self._bf16("markov_head.head.weight", (c.vocab_size, c.dspark_markov_rank), "draft")
            yield self._bf16("confidence_head.proj.weight", (1, c.hidden_size + c.dspark_markov_rank), "draft")

    def _plain(self, name: str, shape: tuple[int, ...], dtype: str, kind: str) -> TensorSpec:
        return TensorSpec(f"{self.prefix}.{name}", shape, dtype, self.kind or kind)

    def _bf16(self, name: str, shape: tuple[int, ...], kind: str) -> TensorSpec:
        return self._plain(name, shape, "BF16", kind)

    def _f32(self, name: str, shape: tuple[int, ...], kind: str) -> TensorSpec:
        return self._plain(name, shape, "F32", kind)

    def _norm(self, name: str, width: int) -> TensorSpec:
        return self._bf16(f"{name}.weight", (width,), "norms")

    def _fp8(
        self, name: str, rows: int, columns: int, kind: str, block: tuple[int, int] | None = None
    ) -> Iterator[TensorSpec]:
        yield self._plain(f"{name}.weight", (rows, columns), "F8_E4M3", kind)
        yield self._scale(name, rows, columns, kind, block or self.block)

    def _fp4(self, name: str, rows: int, columns: int, kind: str) -> Iterator[TensorSpec]:
        yield self._plain(f"{name}.weight", (rows, columns // 2), "I8", kind)
        yield self._scale(name, rows, columns, kind, (1, ROW_GROUP))

    def _scale(self, name: str, rows: int, columns: int, kind: str, block: tuple[int, int]) -> TensorSpec:
        shape = scale_shape(rows, columns, block)
        return TensorSpec(f"{self.prefix}.{name}.scale", shape, "F8_E8M0", self.kind or kind, block)

    def _hyper_connection(self, name: str) -> Iterator[TensorSpec]:
        streams = self.config.hc_mult
        coefficients = 2 * streams + streams * streams
        yield self._f32(f"{name}_fn", (coefficients, streams * self.config.hidden_size), "hyper connections")
        yield self._f32(f"{name}_base", (coefficients,), "hyper connections")
        yield self._f32(f"{name}_scale", (3,), "hyper connections")

    def _attention(self) -> Iterator[TensorSpec]:
        c = self.config
        heads_width, groups_width = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
        yield from self._fp8("attn.wq_a", c.q_lora_rank, c.hidden_size, "attention")
        yield self._norm("attn.q_norm", c.q_lora_rank)
        yield from self._fp8("attn.wq_b", heads_width, c.q_lora_rank, "attention")
        yield from self._fp8("attn.wkv", c.head_dim, c.hidden_size, "attention")
        yield self._norm("attn.kv_norm", c.head_dim)
        yield self._f32("attn.attn_sink", (c.num_attention_heads,), "attention")
        yield from self._fp8("attn.wo_a", groups_width, heads_width // c.o_groups, "attention")
        yield from self._fp8("attn.wo_b", c.hidden_size, groups_width, "attention")

    def _compressor(self, pools: bool) -> Iterator[TensorSpec]:
        c = self.config
        yield self._bf16("attn.compressor.wkv.weight", (c.head_dim, c.hidden_size), "compressor")
        if pools:
            yield self._bf16("attn.compressor.wgate.weight", (c.head_dim, c.hidden_size), "compressor")
        yield self._norm("attn.compressor.norm", c.head_dim)
        yield self._bf16("attn.indexer.wk.weight", (c.index_head_dim, c.head_dim), "indexer")
        yield self._norm("attn.indexer.k_norm", c.index_head_dim)

    def _indexer(self) -> Iterator[TensorSpec]:
        c = self.config
        yield from self._fp8("attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, "indexer")
        yield self._bf16("attn.indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size), "indexer")

    def _engram(self, rows: int) -> Iterator[TensorSpec]:
        c = self.config
        yield from self._fp8("engram.embed", rows, c.engram_head_dim, "engram tables", (1, ROW_GROUP))
        width = c.engram_columns * c.engram_head_dim
        yield from self._fp8("engram.wkv", (c.hc_mult + 1) * c.hidden_size, width, "engram")
        yield self._bf16("engram.q_weight", (c.hc_mult, c.hidden_size), "engram")
        yield self._bf16("engram.k_weight", (c.hc_mult, c.hidden_size), "engram")

    def _moe(self, num_experts: int) -> Iterator[TensorSpec]:
        c = self.config
        hidden, inner = c.hidden_size, c.moe_intermediate_size
        yield self._bf16("ffn.gate.weight", (num_experts, hidden), "gate")
        yield self._f32("ffn.gate.bias", (num_experts,), "gate")
        yield self._f32("ffn.gate.bias_vl", (num_experts,), "gate")
        for name, rows, columns in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
            for expert in range(num_experts):
                yield from self._fp4(f"ffn.experts.{expert}.{name}", rows, columns, "experts")
            if c.n_shared_experts:
                yield from self._fp8(f"ffn.shared_experts.{name}", rows, columns, "shared experts")


def shards(config: ModelConfig) -> list[list[str]]:
    """Names of the text and draft tensors, grouped as the release distributes them over its shards.

    Embedding, one shard a block, final norm and head, one a draft block, one an Engram layer (spec 2.1; the release
    has a vision shard in front).
    """
    groups: dict[tuple[int, int], list[str]] = {}
    for name in expected_tensors(config):
        groups.setdefault(_shard_key(name), []).append(name)
    return [groups[key] for key in sorted(groups)]


def _shard_key(name: str) -> tuple[int, int]:
    first, *rest = name.split(".")
    if first == "embed":
        return 0, 0
    if first in ("norm", "head"):
        return 2, 0
    if first == "mtp":
        return 3, int(rest[0])
    return (4 if rest[1] == "engram" else 1), int(rest[0])
