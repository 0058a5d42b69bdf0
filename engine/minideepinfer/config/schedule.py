"""Which block does what: ratios, sources and candidates, derived from the config and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minideepinfer.config.model import TextConfig


@dataclass(frozen=True)
class LayerSchedule:
    """The role of one block (spec section 0).

    Attributes:
        layer_id: position among the blocks.
        compress_ratio: tokens per global entry; 0 = window only. Ratio 1 *is* a global path.
        kv_source: block whose global entries it reads, None if window only.
        index_source: block whose selection it uses, None if window only.
        is_candidate_source: it publishes candidate blocks; the first layer of the decoder.
        behind_candidate_source: it comes after that one.
        uses_candidates: it selects among candidate blocks only.
        engram_index: which Engram table it injects, None if none.
    """

    layer_id: int
    compress_ratio: int
    kv_source: int | None
    index_source: int | None
    is_candidate_source: bool
    behind_candidate_source: bool
    uses_candidates: bool
    engram_index: int | None

    @property
    def is_kv_source(self) -> bool:
        """It computes global entries and index keys."""
        return self.kv_source == self.layer_id

    @property
    def is_index_source(self) -> bool:
        """It runs an indexer."""
        return self.index_source == self.layer_id

    @property
    def kind(self) -> str:
        """`window`, `full`, `reindex` or `reuse`."""
        if self.compress_ratio == 0:
            return "window"
        if self.is_kv_source:
            return "full"
        return "reindex" if self.is_index_source else "reuse"


def layer_schedule(config: TextConfig) -> tuple[LayerSchedule, ...]:
    """Derive every block's role; the config must have passed `check_schedule`."""
    engram = {layer: index for index, layer in enumerate(config.engram_layer_ids)}
    layers = []
    for layer_id in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer_id]
        index_source = _latest(config.index_source_layer_ids, layer_id) if ratio else None
        layers.append(
            LayerSchedule(
                layer_id=layer_id,
                compress_ratio=ratio,
                kv_source=_latest(config.kv_source_layer_ids, layer_id) if ratio else None,
                index_source=index_source,
                is_candidate_source=layer_id == config.candidate_source_layer_id,
                behind_candidate_source=layer_id > config.candidate_source_layer_id,
                uses_candidates=index_source == layer_id and layer_id > config.candidate_source_layer_id,
                engram_index=engram.get(layer_id),
            )
        )
    return tuple(layers)


def check_schedule(config: TextConfig) -> list[str]:
    """Everything about a config that cannot be right, one sentence each; empty if it can be built."""
    return [*_check_widths(config), *_check_sources(config), *_check_engram(config), *_check_draft(config)]


def _latest(ids: tuple[int, ...], layer_id: int) -> int | None:
    return max((i for i in ids if i <= layer_id), default=None)


def _check_widths(c: TextConfig) -> list[str]:
    problems = []
    for name, width in (
        ("hidden_size", c.hidden_size),
        ("moe_intermediate_size", c.moe_intermediate_size),
        ("head_dim", c.head_dim),
        ("index_head_dim", c.index_head_dim),
        ("engram_head_dim", c.engram_head_dim),
        ("q_lora_rank", c.q_lora_rank),
        ("o_groups * o_lora_rank", c.o_groups * c.o_lora_rank),
    ):
        if width % 32:
            problems.append(f"{name} {width} is not a multiple of the quantisation group of 32")
    if c.num_attention_heads % c.o_groups:
        problems.append(f"num_attention_heads {c.num_attention_heads} is not divisible by o_groups {c.o_groups}")
    for name, width in (("head_dim", c.head_dim), ("index_head_dim", c.index_head_dim)):
        if c.qk_rope_head_dim > width:
            problems.append(f"qk_rope_head_dim {c.qk_rope_head_dim} exceeds {name} {width}")
    if c.qk_rope_head_dim % 2:
        problems.append(f"qk_rope_head_dim {c.qk_rope_head_dim} is odd, but channels rotate in pairs")
    if c.num_experts_per_tok > c.n_routed_experts:
        problems.append(f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}")
    return problems


def _check_sources(c: TextConfig) -> list[str]:
    problems = []
    expected = c.num_hidden_layers + c.num_nextn_predict_layers
    if len(c.compress_ratios) != expected:
        return [
            f"compress_ratios has {len(c.compress_ratios)} entries, but num_hidden_layers {c.num_hidden_layers} + "
            f"num_nextn_predict_layers {c.num_nextn_predict_layers} need {expected}"
        ]
    ratios, draft_ratios = c.compress_ratios[: c.num_hidden_layers], c.compress_ratios[c.num_hidden_layers :]
    if bad := sorted({r for r in ratios if r not in (0, 1, 2)}):
        problems.append(f"compress_ratios holds {bad}; known ratios are 0, 1 and 2")
    if any(draft_ratios):
        problems.append(f"draft layers have compress ratios {list(draft_ratios)}; they attend to a window only (0)")
    for name, ids in (
        ("kv_source_layer_ids", c.kv_source_layer_ids),
        ("index_source_layer_ids", c.index_source_layer_ids),
        ("engram_layer_ids", c.engram_layer_ids),
    ):
        if list(ids) != sorted(set(ids)):
            problems.append(f"{name} {list(ids)} is not strictly ascending")
        if out := [i for i in ids if not 0 <= i < c.num_hidden_layers]:
            problems.append(f"{name} names layers {out}, but the model has 0..{c.num_hidden_layers - 1}")
    if problems:
        return problems
    for name, ids in (("KV", c.kv_source_layer_ids), ("index", c.index_source_layer_ids)):
        problems += [f"{name} source {i} has compress ratio 0, so it has no global path" for i in ids if not ratios[i]]
    if missing := sorted(set(c.kv_source_layer_ids) - set(c.index_source_layer_ids)):
        problems.append(f"KV sources {missing} are not index sources, so nothing selects among their entries")
    for layer_id, ratio in enumerate(ratios):
        if not ratio:
            continue
        kv, index = _latest(c.kv_source_layer_ids, layer_id), _latest(c.index_source_layer_ids, layer_id)
        if kv is None or index is None:
            problems.append(f"layer {layer_id} has compress ratio {ratio} but no KV and index source before it")
        elif ratios[kv] != ratio:
            problems.append(f"layer {layer_id} has compress ratio {ratio}, its KV source {kv} has {ratios[kv]}")
    return problems + _check_candidates(c)


def _check_candidates(c: TextConfig) -> list[str]:
    source = c.candidate_source_layer_id
    if source not in c.kv_source_layer_ids:
        return [f"candidate_source_layer_id {source} is not among kv_source_layer_ids {list(c.kv_source_layer_ids)}"]
    if source != max(c.kv_source_layer_ids):
        return [f"candidate_source_layer_id {source} is not the last KV source, so later blocks read other entries"]
    if not all(c.compress_ratios[source : c.num_hidden_layers]):
        return [f"a layer behind candidate_source_layer_id {source} has compress ratio 0"]
    return []


def _check_engram(c: TextConfig) -> list[str]:
    problems = []
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        problems.append(
            f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries, engram_layer_ids "
            f"{len(c.engram_layer_ids)}"
        )
    if any(c.engram_vocab_size > rows for rows in c.engram_num_embeddings):
        problems.append(
            f"engram_vocab_size {c.engram_vocab_size}, the least size of one hash bucket, exceeds the rows of a table "
            f"({list(c.engram_num_embeddings)})"
        )
    if c.engram_pad_token_id >= c.vocab_size:
        problems.append(f"engram_pad_token_id {c.engram_pad_token_id} is outside the vocabulary of {c.vocab_size}")
    if c.engram_compressed_vocab_size > c.vocab_size:
        problems.append(
            f"engram_compressed_vocab_size {c.engram_compressed_vocab_size} exceeds vocab_size {c.vocab_size}"
        )
    return problems


def _check_draft(c: TextConfig) -> list[str]:
    if not c.num_nextn_predict_layers:
        return []
    problems = []
    if out := [i for i in c.dspark_target_layer_ids if not 0 <= i < c.num_hidden_layers]:
        problems.append(f"dspark_target_layer_ids names layers {out}, but the model has 0..{c.num_hidden_layers - 1}")
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        problems.append(
            f"dspark_num_experts_per_tok {c.dspark_num_experts_per_tok} exceeds dspark_n_routed_experts "
            f"{c.dspark_n_routed_experts}"
        )
    return problems
