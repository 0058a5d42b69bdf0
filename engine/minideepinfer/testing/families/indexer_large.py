"""Indexer: the overlap of the article that this project starts from, and pages past 2^31 elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.families.indexer_cases import DIMS
from minideepinfer.testing.recipes.batch import PACKED, BatchRecipe, renumber_pages
from minideepinfer.testing.recipes.far import past_int32
from minideepinfer.testing.recipes.indexer import IndexerCase, IndexerRecipe
from minideepinfer.testing.relations import tile_borders
from minideepinfer.testing.subject import Subject

ROWS, ENTRIES, TOPK = 256, 65_536, 512
LEAST_OVERLAP = 0.9934


def overlap(subject: Subject) -> str:
    """How many of the 512 entries that float32 selects by the unrounded numbers are selected in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    dims = subject.nearest(_no_rows(subject.narrowest, dims) for dims in reversed(DIMS)).q.shape[1:]
    q, weights, keys = (torch.randn(shape, generator=generator) for shape in _shapes(*dims))
    case = _overlap_case(subject.narrowest, q, weights, keys)
    wanted = _selected(*(tensor.to(subject.device) for tensor in (q, weights, keys)))
    found, naive = (_overlap(run(case)["indices"], wanted) for run in (subject.run, subject.naive))
    if found < LEAST_OVERLAP:
        raise Violation(f"mean overlap {found:.4f}, needs {LEAST_OVERLAP} (naive has {naive:.4f})")
    return f"mean overlap {found:.4f} of {TOPK} selected from {ENTRIES} (at least {LEAST_OVERLAP}; naive {naive:.4f})"


def _shapes(heads: int, head_dim: int) -> tuple[tuple[int, ...], ...]:
    return (ROWS, heads, head_dim), (ROWS, heads), (ENTRIES, head_dim)


def _no_rows(dtype: str, dims: tuple[int, int]) -> IndexerCase:
    """A case with the problem of the large one, but no rows."""
    heads, head_dim = dims
    recipe = IndexerRecipe(BatchRecipe(page_tokens=64), dtype, num_heads=heads, head_dim=head_dim, topk=TOPK)
    return recipe.build()


def _overlap_case(dtype: str, q: Tensor, weights: Tensor, keys: Tensor) -> IndexerCase:
    """One request whose last rows ask."""
    batch = BatchRecipe((ROWS,), (ENTRIES - ROWS,), page_tokens=64)
    packed = batch.build(torch.Generator().manual_seed(1))
    case, real = (
        _no_rows(dtype, (q.shape[1], q.shape[2])),
        getattr(torch, dtype),
    )
    pool, entries = torch.full((len(keys) // 64 + 2, 64, keys.shape[1]), torch.nan, dtype=real), torch.arange(len(keys))
    pool[packed.block_table[0].long()[entries // 64], entries % 64] = keys.to(real)
    return replace(case, batch=packed, q=q.to(real), head_weights=weights.to(real), index_keys=pool)


def _selected(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The best entries of each row in float32, `[ROWS, TOPK]`."""
    scores = torch.zeros(len(q), len(keys), device=q.device)
    for head in range(q.shape[1]):
        scores += (q[:, head] @ keys.T).relu_() * weights[:, head, None]
    visible = torch.arange(ENTRIES - ROWS, ENTRIES, device=q.device) + 1
    scores.masked_fill_(torch.arange(len(keys), device=q.device) >= visible[:, None], -torch.inf)
    return scores.topk(TOPK).indices.cpu()


def _overlap(found: Tensor, wanted: Tensor) -> float:
    return sum(len(set(a) & set(b)) for a, b in zip(found.tolist(), wanted.tolist(), strict=True)) / wanted.numel()


def far_pages(subject: Subject) -> None:
    """The same keys in pages past 2^31 elements give the same selection."""
    batch = BatchRecipe(seqlens=(2, 3), context_lens=(40, 70), page_tokens=16)
    recipe = IndexerRecipe(batch, subject.narrowest, topk=9, seed=3)
    sizes = [replace(recipe, num_heads=heads, head_dim=dim) for heads, dim in DIMS]
    _far_pages(subject, sizes)
    if PACKED in subject.cache_layouts:
        _far_pages(subject, [size.packed() for size in sizes if size.head_dim % 32 == 0])


def _far_pages(subject: Subject, sizes: Sequence[IndexerRecipe]) -> None:
    near = subject.nearest(size.build() for size in sizes)
    expected = subject.run(near)
    subject.family.compare(subject, near, expected, subject.reference(near), 1.0)
    pool = past_int32(near.index_keys, subject.device)
    far = replace(near, batch=renumber_pages(near.batch, len(pool) - len(near.index_keys)), index_keys=pool)
    found, exact = subject.run(far), subject.properties.deterministic
    subject.agree(near, found, expected, "with pages past 2^31 elements", exact=exact)


SIZES = (
    IndexerRecipe(BatchRecipe((2, 1), (300, 127)), num_heads=5, head_dim=40, topk=70),
    IndexerRecipe(BatchRecipe((35, 1), (100, 3)), num_heads=2, topk=33, numbers="few"),
    IndexerRecipe(BatchRecipe((2,), (1030,), page_tokens=64), num_heads=17, compress_ratio=2, topk=130, numbers="few"),
    IndexerRecipe(BatchRecipe((1, 1), (255, 256), page_tokens=64), num_heads=3, head_dim=64, topk=128, numbers="few"),
    IndexerRecipe(
        BatchRecipe((2, 2), (517, 31), page_tokens=64),
        num_heads=33,
        head_dim=24,
        topk=20,
        role="source",
        candidate_topk_blocks=9,
        candidate_block_size=16,
    ),
    IndexerRecipe(
        BatchRecipe((3,), (400,), page_tokens=64, decode=True),
        num_heads=4,
        topk=65,
        role="reindex",
        candidate_topk_blocks=17,
        candidate_block_size=16,
        numbers="few",
    ),
    IndexerRecipe(
        BatchRecipe((2,), (300,), page_tokens=64),
        head_dim=128,
        compress_ratio=2,
        topk=70,
        kv_quantization="released",
        cache_layout="released",
    ),
    IndexerRecipe(BatchRecipe((2,), (300,), page_tokens=64), num_heads=32, head_dim=128, compress_ratio=2, topk=70),
)
"""The last one has the released dims, which every operator is expected to serve."""


LARGE = (
    tile_borders(SIZES),
    ExplicitCase("overlap", "scores of lower precision than float32 sums of bfloat16 products", overlap, heavy=True),
    ExplicitCase("64-bit-offsets", "offsets in 32 bits: a pool past 2^31 elements wraps around", far_pages),
)
