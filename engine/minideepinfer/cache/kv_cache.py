"""All state that outlives a step: window rings, paged global entries and index keys, pending pairs (spec section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from minideepinfer.cache.layouts import CacheLayout, allocate
from minideepinfer.config import CacheConfig, TextConfig
from minideepinfer.errors import ConfigError
from minideepinfer.model.rows import EntryRows, Rows


def ring_size(config: TextConfig) -> int:
    """Slots of a window ring: the window, and room to roll a rejected draft block back."""
    return config.sliding_window + config.dspark_block_size + 1


def pair_slots(config: TextConfig) -> int:
    """First halves of pairs that a request keeps: the unpaired last token, and those up to a draft block before it."""
    return config.dspark_block_size // 2 + 2


def _check_pages(config: TextConfig, page_tokens: int) -> None:
    """No entry and no block of candidates may span two pages."""
    for layer in config.layers:
        unit = layer.compress_ratio * (config.candidate_block_size if layer.is_candidate_source else 1)
        if layer.is_kv_source and page_tokens % unit:
            raise ConfigError(
                f"cache.page_tokens: {page_tokens} is no multiple of {unit}, which layer {layer.layer_id} needs"
            )


class KVCache:
    """The pools of every layer. One page id addresses the pools of all KV sources; one ring id those of all layers.

    A row of a pool is an entry as the layout holds it: plain channels, or bytes (see `EntryFormat`).

    Attributes:
        layout: of the pools.
        head_dim: channels of window and global entries.
        index_head_dim: channels of index keys.
        window: per layer `[max_requests, ring_size, row]`.
        main: per KV source `[num_pages, page_tokens // ratio, row]`.
        index_keys: per KV source `[num_pages, page_tokens // ratio, row]`.
        pending: per ratio-2 source float32 `[max_requests, pair_slots, 2, head_dim]`, the `(k, s)` of the last first
            tokens of pairs; pair j lies in slot `j % pair_slots`.
    """

    def __init__(self, config: TextConfig, cache: CacheConfig, layout: CacheLayout, device: torch.device) -> None:
        _check_pages(config, cache.page_tokens)
        self.ring_size, self.pair_slots = ring_size(config), pair_slots(config)
        self.layout, self.head_dim, self.index_head_dim = layout, config.head_dim, config.index_head_dim
        try:
            self._allocate(config, cache, device)
        except RuntimeError as error:
            raise ConfigError(
                f"cache: {cache.num_pages} pages of {cache.page_tokens} tokens and {cache.max_requests} window rings "
                f"cannot be allocated on {device}; lower cache.num_pages or cache.max_requests "
                f"({str(error).splitlines()[0]})"
            ) from None

    def _allocate(self, config: TextConfig, cache: CacheConfig, device: torch.device) -> None:
        layout, rings = self.layout, cache.max_requests
        self.window = [allocate(layout.window, rings, self.ring_size, config.head_dim, device) for _ in config.layers]
        self.main: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.pending: dict[int, Tensor] = {}
        for source in (layer for layer in config.layers if layer.is_kv_source):
            entries = cache.page_tokens // source.compress_ratio
            pages, layer_id = (cache.num_pages, entries), source.layer_id
            self.main[layer_id] = allocate(layout.main, *pages, config.head_dim, device)
            self.index_keys[layer_id] = allocate(layout.index, *pages, config.index_head_dim, device)
            if source.compress_ratio > 1:
                self.pending[source.layer_id] = torch.empty(rings, self.pair_slots, 2, config.head_dim, device=device)

    def write_window(self, layer_id: int, values: Tensor, rows: Rows) -> None:
        """Store the window entries of a step; of a request with more rows than slots, the last ones.

        Args:
            layer_id: the layer.
            values: `[T, head_dim]`.
            rows: the rows the values belong to.
        """
        kept, slots = rows.ring_places(self.ring_size)
        self.window[layer_id].flatten(0, 1).index_copy_(0, slots, self.layout.window.encode(values[kept]))

    def write_entries(self, layer_id: int, main: Tensor, index_keys: Tensor, entries: EntryRows) -> None:
        """Store global entries and their index keys.

        Args:
            layer_id: the KV source.
            main: `[N, head_dim]`.
            index_keys: `[N, index_head_dim]`.
            entries: where they go.
        """
        self.main[layer_id][entries.pages, entries.places] = self.layout.main.encode(main)
        self.index_keys[layer_id][entries.pages, entries.places] = self.layout.index.encode(index_keys)

    def copy_ring(self, source: int, target: int) -> None:
        """Copy the window entries and kept halves of pairs of all layers from one ring to another."""
        for pool in self._by_ring:
            pool[target] = pool[source]

    def copy_page(self, source: int, target: int) -> None:
        """Copy the global entries and index keys of all KV sources from one page to another."""
        for pool in self._by_page:
            pool[target] = pool[source]

    @property
    def _by_ring(self) -> list[Tensor]:
        return [*self.window, *self.pending.values()]

    @property
    def _by_page(self) -> list[Tensor]:
        return [*self.main.values(), *self.index_keys.values()]

    @property
    def ring_bytes(self) -> int:
        """Bytes of a ring in all layers, kept halves of pairs included."""
        return sum(pool[0].nbytes for pool in self._by_ring)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all KV sources."""
        return sum(pool[0].nbytes for pool in self._by_page)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in (*self._by_ring, *self._by_page))
