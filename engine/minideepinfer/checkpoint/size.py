"""What a checkpoint will take: per kind, per rank, and per cached token. From the config alone."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from minideepinfer.cache.kv_cache import pair_slots, ring_size
from minideepinfer.cache.layouts import LAYOUTS
from minideepinfer.checkpoint.layout import SKIPPED_KINDS, TensorSpec, expected_tensors
from minideepinfer.checkpoint.verify import Summary, Total, summarize
from minideepinfer.config import ModelConfig, TextConfig
from minideepinfer.errors import ConfigError


@dataclass(frozen=True)
class CacheSize:
    """Bytes of one cache layout.

    Attributes:
        bytes_per_token: global entries and index keys of all KV sources.
        bytes_per_request: window rings of all blocks, and the pending pairs of ratio-2 sources.
    """

    bytes_per_token: Fraction
    bytes_per_request: int


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
    num_experts = config.text_config.n_routed_experts
    if num_experts % ranks:
        raise ConfigError(f"{num_experts} routed experts cannot be divided evenly among {ranks} ranks")
    kinds = {kind: total for kind, total in layout_summary(config).kinds.items() if kind not in SKIPPED_KINDS}
    kinds["experts"] = Total(kinds["experts"].tensors // ranks, kinds["experts"].bytes // ranks)
    tables = [spec for spec in expected_tensors(config).values() if spec.kind == "engram tables"]
    return [Summary(kinds | _tables_of_rank(tables, rank, ranks)) for rank in range(ranks)]


def cache_sizes(config: TextConfig) -> dict[str, CacheSize]:
    """Bytes of the caches in each layout (spec 5)."""
    ratios = [config.compress_ratios[layer_id] for layer_id in config.kv_source_layer_ids]
    entries = sum((Fraction(1, ratio) for ratio in ratios), Fraction())
    ring_rows = config.num_hidden_layers * ring_size(config)
    pending = pair_slots(config) * sum(4 * 2 * config.head_dim for ratio in ratios if ratio > 1)
    return {
        name: CacheSize(
            entries * (layout.entry_bytes(config.head_dim) + layout.entry_bytes(config.index_head_dim)),
            ring_rows * layout.entry_bytes(config.head_dim) + pending,
        )
        for name, layout in LAYOUTS.items()
    }


def _tables_of_rank(tables: list[TensorSpec], rank: int, ranks: int) -> dict[str, Total]:
    size = 0
    for spec in tables:
        rows = spec.shape[0]
        size += spec.nbytes // rows * (rows * (rank + 1) // ranks - rows * rank // ranks)
    return {"engram tables": Total(len(tables), size)} if tables else {}
