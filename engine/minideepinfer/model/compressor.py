"""Global entries and index keys of a KV source (spec 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.config import LayerSchedule, TextConfig
from minideepinfer.model.linear import linear, rms_norm
from minideepinfer.model.rope import RotaryTable, apply_rope
from minideepinfer.model.rows import EntryRows, Rows
from minideepinfer.model.weights import CompressorWeights
from minideepinfer.quantization import qdq_mxfp4, qdq_nvfp4


class Compressor:
    """Publishes one entry for every `compress_ratio` tokens."""

    def __init__(
        self, layer: LayerSchedule, weights: CompressorWeights, config: TextConfig, rope: RotaryTable, quantize: bool
    ) -> None:
        self.layer = layer
        self.weights = weights
        self.eps = config.rms_norm_eps
        self.rope = rope
        self.quantize = quantize

    def publish(self, x: Tensor, rows: Rows, cache: KVCache) -> tuple[Tensor, Tensor, EntryRows]:
        """Compute the entries that these rows complete and store them; carry what stays unpaired.

        Args:
            x: `[T, H]`, the normalised input of the layer.
            rows: the rows.
            cache: pools and pending pairs.

        Returns:
            Main entries `[N, head_dim]` and index keys `[N, index_head_dim]` as stored, and where they went.
        """
        entries = rows.entries(self.layer.compress_ratio, cache.pair_slots)
        latent = self._latent(x, entries, cache)
        cos, sin = self.rope.cos_sin(entries.positions)
        main = apply_rope(latent, cos, sin)
        keys = apply_rope(rms_norm(linear(latent, self.weights.wk), self.weights.k_norm, self.eps), cos, sin)
        if self.quantize:
            main, keys = qdq_nvfp4(main), qdq_mxfp4(keys)
        cache.write_entries(self.layer.layer_id, main, keys, entries)
        return main, keys, entries

    def _latent(self, x: Tensor, entries: EntryRows, cache: KVCache) -> Tensor:
        weights = self.weights
        if weights.wgate is None:
            pooled = linear(x[entries.rows], weights.wkv)
        else:
            pair = torch.stack([linear(x.float(), weights.wkv), linear(x.float(), weights.wgate)], dim=1)
            pooled = self._pool(pair, entries, cache.pending[self.layer.layer_id]).to(x.dtype)
        return rms_norm(pooled, weights.norm, self.eps)

    @staticmethod
    def _pool(pair: Tensor, entries: EntryRows, pending: Tensor) -> Tensor:
        """Gate the two tokens of each entry, channel by channel; `pair` is float32 `[T, 2, head_dim]` of (k, s)."""
        first = torch.where(
            entries.pending[:, None, None],
            pending[entries.rings, entries.slots],
            pair[(entries.rows - 1).clamp(min=0)],
        )
        k, s = torch.stack([first, pair[entries.rows]], dim=1).unbind(2)
        pending[entries.half_rings, entries.half_slots] = pair[entries.half_rows]
        return (torch.softmax(s, dim=1) * k).sum(1)
