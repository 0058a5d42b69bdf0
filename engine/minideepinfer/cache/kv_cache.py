"""All state that outlives a step: window rings, paged global entries and index keys, pending pairs (spec section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from minideepinfer.cache.layouts import CacheLayout
from minideepinfer.config import CacheConfig, TextConfig
from minideepinfer.model.rows import EntryRows, Rows


def ring_size(config: TextConfig) -> int:
    """Slots of a window ring: the window, and room to roll a rejected draft block back."""
    return config.sliding_window + config.dspark_block_size + 1


class KVCache:
    """The pools of every layer. One page id addresses the pools of all KV sources; one ring id those of all layers.

    Attributes:
        window: per layer `[max_requests, ring_size, head_dim]`.
        main: per KV source `[num_pages, page_tokens // ratio, head_dim]`.
        index_keys: per KV source `[num_pages, page_tokens // ratio, index_head_dim]`.
        pending: per ratio-2 source float32 `[max_requests, 2, head_dim]`, the `(k, s)` of an unpaired last token.
    """

    def __init__(self, config: TextConfig, cache: CacheConfig, layout: CacheLayout, device: torch.device) -> None:
        self.ring_size = ring_size(config)
        self.layout = layout
        rings = cache.max_requests
        self.window = [layout.allocate(rings, self.ring_size, config.head_dim, device) for _ in config.layers]
        self.main: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.pending: dict[int, Tensor] = {}
        for source in (layer for layer in config.layers if layer.is_kv_source):
            entries = cache.page_tokens // source.compress_ratio
            self.main[source.layer_id] = layout.allocate(cache.num_pages, entries, config.head_dim, device)
            self.index_keys[source.layer_id] = layout.allocate(cache.num_pages, entries, config.index_head_dim, device)
            if source.compress_ratio > 1:
                self.pending[source.layer_id] = torch.empty(rings, 2, config.head_dim, device=device)

    def write_window(self, layer_id: int, values: Tensor, rows: Rows) -> None:
        """Store the window entries of a step; of a request with more rows than slots, the last ones.

        Args:
            layer_id: the layer.
            values: `[T, head_dim]`.
            rows: the rows the values belong to.
        """
        keep = rows.ring_rows(self.ring_size)
        rings = rows.ring_table[rows.request_ids[keep]]
        slots = rows.positions[keep] % self.ring_size
        self.window[layer_id][rings, slots] = values[keep].to(self.layout.dtype)

    def write_entries(self, layer_id: int, main: Tensor, index_keys: Tensor, entries: EntryRows) -> None:
        """Store global entries and their index keys.

        Args:
            layer_id: the KV source.
            main: `[N, head_dim]`.
            index_keys: `[N, index_head_dim]`.
            entries: where they go.
        """
        self.main[layer_id][entries.pages, entries.places] = main.to(self.layout.dtype)
        self.index_keys[layer_id][entries.pages, entries.places] = index_keys.to(self.layout.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        pools = [*self.window, *self.main.values(), *self.index_keys.values(), *self.pending.values()]
        return sum(pool.numel() * pool.element_size() for pool in pools)
