"""Global entries and index keys of a KV source (spec 3.5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.config import LayerSchedule
from minideepinfer.model.epilogue import Epilogue
from minideepinfer.model.linear import wide_linear
from minideepinfer.model.rope import RotaryTable
from minideepinfer.model.rows import EntryRows, Rows
from minideepinfer.model.weights import CompressorWeights
from minideepinfer.operators import Phase


class Compressor:
    """Publishes one entry for every `compress_ratio` tokens."""

    def __init__(self, layer: LayerSchedule, weights: CompressorWeights, rope: RotaryTable, epilogue: Epilogue) -> None:
        self.layer = layer
        self.weights = weights
        self.rope = rope
        self.epilogue = epilogue

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
        weights, epilogue, angles = self.weights, self.epilogue, entries.angles(self.rope)
        latent = self._latent(x, entries, cache, rows.phase)
        keys = F.linear(latent, weights.wk)
        keys = epilogue.run(keys, rows.phase, norm=weights.k_norm, angles=angles, quantization=epilogue.kv("mxfp4"))
        main = epilogue.run(latent, rows.phase, angles=angles, quantization=epilogue.kv("nvfp4"))
        cache.write_entries(self.layer.layer_id, main, keys, entries)
        return main, keys, entries

    def _latent(self, x: Tensor, entries: EntryRows, cache: KVCache, phase: Phase) -> Tensor:
        weights = self.weights
        if self.layer.compress_ratio == 1:
            whole = len(entries.rows) == len(x)  # but for rows that run again behind a prefix hit
            pooled = F.linear(x if whole else x[entries.rows], weights.wkv)
        else:
            pair = wide_linear(x, weights.wkv).unflatten(1, (2, -1))
            pooled = self._pool(pair, entries, cache.pending[self.layer.layer_id]).to(x.dtype)
        return self.epilogue.run(pooled, phase, norm=weights.norm)

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
