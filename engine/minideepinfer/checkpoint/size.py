"""What a checkpoint will take: per kind, per rank, and per cached token. From the config alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from minideepinfer.cache.entry_bytes import PACKINGS, entry_bytes
from minideepinfer.cache.kv_cache import pair_slots, ring_size
from minideepinfer.checkpoint.layout import KINDS, SKIPPED_KINDS, TensorSpec, expected_tensors
from minideepinfer.checkpoint.partition import Partition, check_experts
from minideepinfer.checkpoint.verify import Summary, Total, summarize
from minideepinfer.config import CacheConfig, ModelConfig, TextConfig

PAGE_TOKENS: int = CacheConfig().page_tokens
"""Tokens of a page, if the engine's configuration says nothing else."""


@dataclass(frozen=True)
class CacheSize:
    """Bytes of one cache layout.

    Attributes:
        bytes_per_token: global entries and index keys of all KV sources.
        bytes_per_page: the same of `PAGE_TOKENS` tokens. A request holds whole pages.
        bytes_per_request: window rings of all blocks, and the pending pairs of ratio-2 sources.
    """

    bytes_per_token: Fraction
    bytes_per_request: int

    @property
    def bytes_per_page(self) -> int:
        """See `CacheSize`."""
        return math.ceil(self.bytes_per_token * PAGE_TOKENS)


def layout_summary(config: ModelConfig) -> Summary:
    """Totals per kind of what the config describes: text model and draft, no vision."""
    specs = expected_tensors(config)
    return summarize({name: spec.kind for name, spec in specs.items()}, specs)


def rank_summaries(config: ModelConfig, ranks: int) -> list[Summary]:
    """What each rank reads: its experts, its rows of the Engram tables, all of the rest; no draft and no vision.

    Args:
        config: of the checkpoint.
        ranks: ranks in all. Experts and rows are shared out in contiguous parts, rank 0 first.

    Returns:
        Totals per kind, bytes as stored, one summary a rank.

    Raises:
        ConfigError: the routed experts cannot be divided evenly.
    """
    return _of_ranks(config, ranks, lambda spec: spec.nbytes)


def memory_summaries(config: ModelConfig, ranks: int, dtype: str) -> list[Summary]:
    """What the weights of each rank take in memory, as they are loaded, before operators transform their own.

    Experts, tables, embedding and gate stay as stored; all other matrices have the compute dtype; norms, mHC and small
    vectors become float32 (as `minideepinfer.model.load` does).

    Args:
        config: of the checkpoint.
        ranks: see `rank_summaries`.
        dtype: compute dtype, `float32` or `bfloat16`.

    Raises:
        ConfigError: the routed experts cannot be divided evenly.
    """
    size = {"float32": 4, "bfloat16": 2}[dtype]
    return _of_ranks(config, ranks, lambda spec: _loaded_bytes(spec, size))


def _of_ranks(config: ModelConfig, ranks: int, nbytes: Callable[[TensorSpec], int]) -> list[Summary]:
    """Totals per kind and rank, each tensor having as many bytes as the function says."""
    check_experts(config.text_config.n_routed_experts, ranks)
    totals: dict[str, list[int]] = {}
    tables = []
    for spec in expected_tensors(config).values():
        if spec.kind in SKIPPED_KINDS or spec.name.endswith(".gate.bias_vl"):
            continue
        if spec.kind == "engram tables":
            tables.append(spec)
            continue
        total = totals.setdefault(spec.kind, [0, 0])
        total[0] += 1
        total[1] += nbytes(spec)
    if "experts" in totals:
        totals["experts"] = [count // ranks for count in totals["experts"]]
    common = {kind: Total(*total) for kind, total in totals.items()}
    return [Summary(_ordered(common | _tables_of(tables, Partition(rank, ranks)))) for rank in range(ranks)]


def _ordered(kinds: dict[str, Total]) -> dict[str, Total]:
    return {kind: kinds[kind] for kind in KINDS if kind in kinds}


def _loaded_bytes(spec: TensorSpec, size: int) -> int:
    elements = math.prod(spec.shape)
    if spec.kind in ("experts", "embedding") or spec.name.endswith(".gate.weight"):
        return spec.nbytes
    if spec.dtype == "F8_E8M0" or spec.name.endswith(".engram.k_weight"):  # is in the decoded weight, or in q_weight
        return 0
    if spec.dtype == "F8_E4M3" or spec.kind in ("head", "indexer", "compressor"):
        return elements * size
    return elements * 4


def cache_sizes(config: TextConfig) -> dict[str, CacheSize]:
    """Bytes of the caches in each layout (spec 5)."""
    ratios = [config.compress_ratios[layer_id] for layer_id in config.kv_source_layer_ids]
    entries = sum((Fraction(1, ratio) for ratio in ratios), Fraction())
    ring_rows = config.num_hidden_layers * ring_size(config)
    pending = pair_slots(config) * sum(4 * 2 * config.head_dim for ratio in ratios if ratio > 1)
    return {
        name: CacheSize(
            entries * (entry_bytes(name, "main", config.head_dim) + entry_bytes(name, "index", config.index_head_dim)),
            ring_rows * entry_bytes(name, "window", config.head_dim) + pending,
        )
        for name in PACKINGS
    }


def _tables_of(tables: list[TensorSpec], part: Partition) -> dict[str, Total]:
    size = sum(spec.nbytes // spec.shape[0] * len(part.rows(spec.shape[0])) for spec in tables)
    return {"engram tables": Total(len(tables), size)} if tables else {}
