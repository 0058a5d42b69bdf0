"""Indexer calls over shuffled pages; keys that no row may see are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.cache.layouts import cache_layout
from minideepinfer.operators import TOKEN_INDICES, Batch, IndexerProblem
from minideepinfer.quantization import qdq_mxfp4
from minideepinfer.testing.recipes.batch import (
    NAN,
    NO_REQUESTS,
    PACKED,
    PLAIN,
    BatchRecipe,
    facts,
    layout_name,
    num_pages,
    split_requests,
    take_requests,
)

ROLES = ("plain", "source", "reindex")


@dataclass(frozen=True)
class IndexerCase:
    """One indexer call, keys in the problem's cache layout.

    `exact` = its numbers are small integers, so that every score is exact.
    """

    problem: IndexerProblem
    batch: Batch
    q: Tensor
    head_weights: Tensor
    index_keys: Tensor
    candidates: Tensor | None
    exact: bool = False

    @property
    def units(self) -> int:
        """Requests."""
        return self.batch.num_requests

    def run(self, operator: Any) -> tuple[Tensor, Tensor | None]:
        """Call an operator: selected indices (-1 past `lens`) and candidates."""
        metadata = operator.prepare(self.batch)
        output = operator.run(self.q, self.head_weights, self.index_keys, self.candidates, metadata)
        indices, lens = output.selection.indices, output.selection.lens
        if lens is not None:
            indices = indices.where(torch.arange(indices.shape[1], device=lens.device) < lens[:, None], -1)
        return indices, output.candidates

    def take(self, order: Sequence[int]) -> tuple[IndexerCase, Tensor]:
        """Some requests in another order, and which old row each new row is."""
        batch, rows = take_requests(self.batch, order)
        return self._rows(batch, rows), rows

    def split(self) -> tuple[tuple[IndexerCase, Tensor], tuple[IndexerCase, Tensor]]:
        """Two steps instead of one; the keys are there in both."""
        (head, first), (tail, rest) = split_requests(self.batch)
        return (self._rows(head, first), first), (self._rows(tail, rest), rest)

    def _rows(self, batch: Batch, rows: Tensor) -> IndexerCase:
        candidates = None if self.candidates is None else self.candidates[rows]
        return replace(self, batch=batch, q=self.q[rows], head_weights=self.head_weights[rows], candidates=candidates)

    def logical_keys(self, row: int) -> Tensor:
        """The keys a row sees, in logical order, float64 `[visible, d]`."""
        visible = int(self.batch.visible_entries(self.problem.compress_ratio)[row])
        entries, per_page = torch.arange(visible), self.index_keys.shape[1]
        pages = self.batch.block_table[self.batch.request_ids[row]].long()[entries // per_page]
        keys = self.index_keys[pages, entries % per_page]
        return cache_layout(self.problem.cache_layout).index.decode(keys, torch.float32).double()


@dataclass(frozen=True)
class IndexerRecipe:
    """Makes an indexer call; the field names are those of `IndexerProblem` where it has them.

    Attributes:
        batch: the packed rows.
        role: one of `ROLES`: no candidates, emits them, uses them.
        numbers: `normal`; `few`, small integers, so that scores are exact and ties are everywhere; or `zero`, all
            scores equal.
        positive_weights: whether head weights are all positive.
        q_amplitude: standard deviation of q where numbers are normal.
        key_amplitude: the same for keys.
        cache_layout: `plain`; or `released`, which needs `kv_quantization: released`.
        kv_quantization: `released`: queries and keys are MXFP4 numbers, as in a model (head_dim a multiple of 32).
        named: which candidate blocks are given: any, with numbers that are no block's; `none`; or `all`, newest first.
        seed: of all numbers.
    """

    batch: BatchRecipe = NO_REQUESTS
    dtype: str = "float32"
    num_heads: int = 1
    head_dim: int = 4
    compress_ratio: int = 1
    topk: int = 3
    role: str = "plain"
    candidate_topk_blocks: int = 2
    candidate_block_size: int = 2
    numbers: str = "normal"
    positive_weights: bool = False
    q_amplitude: float = 1.0
    key_amplitude: float = 1.0
    cache_layout: str = PLAIN
    kv_quantization: str = "none"
    named: str = "any"
    seed: int = 0

    def build(self) -> IndexerCase:
        """The call."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype, batch = getattr(torch, self.dtype), self.batch.build(generator)

        def numbers(*shape: int, amplitude: float = 1.0) -> Tensor:
            if self.numbers == "normal":
                return (torch.randn(shape, generator=generator) * amplitude).to(dtype)
            few = torch.randint(-1, 2, shape, generator=generator).to(dtype)
            return few if self.numbers == "few" else -few.abs()

        def vectors(*shape: int, amplitude: float) -> Tensor:
            drawn = numbers(*shape, self.head_dim, amplitude=amplitude)
            return qdq_mxfp4(drawn) if self.kv_quantization == "released" else drawn

        q = vectors(batch.num_tokens, self.num_heads, amplitude=self.q_amplitude)
        if self.numbers == "zero":
            q = -q
        q[batch.positions < 0] = NAN
        per_page = self.batch.page_tokens // self.compress_ratio
        keys = torch.full((num_pages(batch), per_page, self.head_dim), NAN, dtype=dtype)
        visible = batch.visible_entries(self.compress_ratio)
        for request, pages in enumerate(batch.block_table):
            seen = visible[batch.request_ids == request].tolist()
            for entry in range(max([*seen, 0])):
                keys[pages[entry // per_page], entry % per_page] = vectors(amplitude=self.key_amplitude)
        if self.cache_layout != PLAIN:  # groups of channels with scales of their own
            factors = 2.0 ** torch.randint(-3, 4, (*keys.shape[:2], self.head_dim // 32, 1), generator=generator)
            keys = (keys.unflatten(-1, (-1, 32)) * factors).flatten(-2).to(dtype)
        head_weights = numbers(batch.num_tokens, self.num_heads)
        candidates = torch.randint(-1, 26, (batch.num_tokens, self.candidate_topk_blocks), generator=generator).int()
        if self.named == "none":
            candidates[:] = -1
        elif self.named == "all":
            candidates[:] = torch.arange(self.candidate_topk_blocks - 1, -1, -1)
        return IndexerCase(
            problem=self.problem(batch),
            batch=batch,
            q=q,
            head_weights=head_weights.abs() if self.positive_weights else head_weights,
            index_keys=keys if self.cache_layout == PLAIN else cache_layout(self.cache_layout).index.encode(keys),
            candidates=candidates if self.role == "reindex" else None,
            exact=self.numbers != "normal",
        )

    def packed(self) -> IndexerRecipe:
        """The recipe with keys in bytes, if its dims allow that."""
        return self if self.head_dim % 32 else replace(self, cache_layout=PACKED, kv_quantization="released")

    def problem(self, batch: Batch) -> IndexerProblem:
        """What the operator is told of a batch of this recipe."""
        dtype = getattr(torch, self.dtype)
        names = ("num_heads", "head_dim", "compress_ratio", "topk", "candidate_topk_blocks", "candidate_block_size")
        return IndexerProblem(
            **facts(dtype, batch.phase) | {"kv_quantization": self.kv_quantization},
            **{name: getattr(self, name) for name in names},
            emits_candidates=self.role == "source",
            uses_candidates=self.role == "reindex",
            page_tokens=batch.page_tokens,
            cache_layout=layout_name(self.cache_layout, dtype),
            selection_layout=TOKEN_INDICES,
        )
