"""A cache full of random entries, as if requests had a past."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.cache.layouts import EntryFormat
from minideepinfer.config import EngineConfig
from minideepinfer.quantization import qdq_fp8, qdq_mxfp4, qdq_nvfp4

_PIECE = 2048
"""Rings or pages that are rounded at a time; bounds memory."""


def fill_cache(cache: KVCache, released: bool, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Random entries in every ring and page.

    Args:
        cache: to be filled.
        released: whether entries are rounded as the model was trained.
        dtype: compute dtype, in which they are made.
        generator: of the cache's device.
    """
    layout, width, index_width = cache.layout, cache.head_dim, cache.index_head_dim
    _fill(cache.window, layout.window, width, qdq_fp8 if released else None, dtype, generator)
    _fill(cache.main.values(), layout.main, width, qdq_nvfp4 if released else None, dtype, generator)
    _fill(cache.index_keys.values(), layout.index, index_width, qdq_mxfp4 if released else None, dtype, generator)
    for pool in cache.pending.values():
        pool.normal_(generator=generator)


def _fill(
    pools: Iterable[Tensor],
    entries: EntryFormat,
    width: int,
    rounded: Callable[[Tensor], Tensor] | None,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    for pool in pools:
        for piece in pool.split(_PIECE):
            values = torch.empty(*piece.shape[:2], width, dtype=dtype, device=pool.device).normal_(generator=generator)
            piece.copy_(entries.encode(values if rounded is None else rounded(values)))


def with_cache(engine_config: EngineConfig, num_pages: int, max_requests: int, **others: bool) -> EngineConfig:
    """The same configuration with room for just that, and other settings of the cache."""
    update = {"num_pages": num_pages, "max_requests": max_requests, **others}
    cache = engine_config.cache.model_copy(update=update)
    return engine_config.model_copy(update={"cache": cache})
