"""Attention: the figures of the article that this project starts from, and pages past 2^31 elements."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import Selection
from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.families.attention_cases import DIMS
from minideepinfer.testing.recipes.attention import AttentionCase, AttentionRecipe, fill_readable
from minideepinfer.testing.recipes.batch import BatchRecipe, renumber_pages
from minideepinfer.testing.recipes.far import past_int32
from minideepinfer.testing.relations import tile_borders
from minideepinfer.testing.subject import Subject

KEYS = ((512, 0), (512, 128), (0, 128))
"""Selected and window keys of each row."""
LARGEST_ERROR = 4.9e-4
"""Half a bfloat16 ulp below 0.25, and nothing more."""


def article(subject: Subject) -> str:
    """q and keys ~ N(0, 1) rounded to bfloat16, 64 heads of 512.

    The article's figures: at most 4.9e-4 from float32 where that is below 0.25, one bfloat16 ulp elsewhere. They leave
    room for the rounding of the result and nothing else, so in bfloat16 what spec 3.8 lays down beside it is added:
    probabilities rounded to bfloat16. The note has the errors as they are.
    """
    rows, notes = 3 if subject.device.type == "cpu" else 64, []
    for dtype in subject.dtypes:
        worst: dict[str, list[float]] = {"small": [], "ulp": [], "naive": []}
        for selected, window in KEYS:
            case = subject.nearest(_article_case(rows, selected, window, dtype, dims) for dims in reversed(DIMS))
            found, reference = subject.run(case)["heads"].double(), subject.reference(case)["heads"].double()
            error, ulp, small = (found - reference).abs(), _ulp(reference), reference.abs() < 0.25
            limit = LARGEST_ERROR + torch.zeros_like(error).where(small, ulp - LARGEST_ERROR)
            if dtype == "bfloat16":
                limit += _rounded_probabilities(case)
            if not bool((error <= limit).all()):
                excess = float((error - limit).nan_to_num(nan=torch.inf).max())
                raise Violation(f"{selected} + {window} keys, {dtype}: {excess:.2e} above the article's bound")
            naive = (subject.naive(case)["heads"].double() - reference).abs()
            worst["small"].append(float(error[small].max()))
            worst["naive"].append(float(naive[small].max()))
            worst["ulp"].append(float((error / ulp)[~small].max()) if bool((~small).any()) else 0.0)
        figures = {name: max(values) for name, values in worst.items()}
        notes.append(
            f"{dtype} largest error {figures['small']:.2e} where |reference| < 0.25 (article 4.9e-04, naive "
            f"{figures['naive']:.2e}), {figures['ulp']:.2f} bfloat16 ulp elsewhere"
        )
    return "; ".join(notes)


def _article_case(rows: int, selected: int, window: int, dtype: str, dims: tuple[int, int, int]) -> AttentionCase:
    """`rows` rows at the end of 640 tokens; without rotation, which would round a second time."""
    context, (heads, head_dim, rope_dim) = 640, dims
    batch = BatchRecipe((rows,), (context,), () if window else (context + rows,), page_tokens=64)
    recipe = AttentionRecipe(
        batch, dtype, heads, head_dim, rope_dim, window or 1, min(selected, 1), max(selected, 1), pattern="none", seed=7
    )
    case, generator = recipe.build(), torch.Generator().manual_seed(8)
    if selected:
        chosen = [torch.randperm(context, generator=generator)[:selected] for _ in range(rows)]
        case = replace(case, selection=Selection(torch.stack(chosen).int()))
        fill_readable(case, generator)

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.bfloat16().to(tensor.dtype)

    pool = None if case.global_kv is None else rounded(case.global_kv)
    numbers: dict[str, Any] = {name: rounded(getattr(case, name)) for name in ("q", "window_new", "window_ring")}
    return replace(case, global_kv=pool, cos=torch.ones_like(case.cos), sin=torch.zeros_like(case.sin), **numbers)


def _ulp(reference: Tensor) -> Tensor:
    """The distance of bfloat16 numbers of that size."""
    return torch.exp2(reference.abs().clamp(min=2.0**-100).log2().floor() - 7)


def _rounded_probabilities(case: AttentionCase) -> Tensor:
    """What rounding each probability to bfloat16 (spec 3.8) adds: six standard deviations, `[T, H, D]`.

    N independent relative errors, uniform within 2^-9: a deviation of 2^-9 / sqrt(3) of the root of sum (p k)^2.
    """
    parts = []
    for row in range(len(case.q)):
        keys = case.keys(row)
        probabilities = (case.q[row].double() @ keys.T * case.scale).softmax(-1)
        parts.append((probabilities.square() @ keys.square()).sqrt())
    return 6 * 2.0**-9 / math.sqrt(3) * torch.stack(parts)


def far_pages(subject: Subject) -> None:
    """The same entries in pages past 2^31 elements give the same bits."""
    batch = BatchRecipe(seqlens=(2, 3), context_lens=(40, 70), page_tokens=16)
    recipe = AttentionRecipe(batch, subject.narrowest, index_topk=9, pattern="valid", seed=3)
    for layout in subject.cache_layouts:
        _far_pages(subject, replace(recipe, cache_layout=layout))


def _far_pages(subject: Subject, recipe: AttentionRecipe) -> None:
    sizes = (replace(recipe, num_heads=heads, head_dim=dim, rope_dim=rope) for heads, dim, rope in DIMS)
    near = subject.nearest(size.build() for size in sizes)
    assert near.global_kv is not None
    expected = subject.run(near)
    subject.family.compare(subject, near, expected, subject.reference(near), 1.0)
    pool = past_int32(near.global_kv, subject.device)
    far = replace(near, batch=renumber_pages(near.batch, len(pool) - len(near.global_kv)), global_kv=pool)
    found, exact = subject.run(far), subject.properties.deterministic
    if not bool(found["heads"].isfinite().all()):
        raise Violation("not a number, with pages past 2^31 elements")
    subject.agree(near, found, expected, "with pages past 2^31 elements", exact=exact)


SIZES = (
    AttentionRecipe(
        BatchRecipe((2, 1), (200, 127)), num_heads=5, head_dim=40, sliding_window=129, index_topk=70, pattern="valid"
    ),
    AttentionRecipe(
        BatchRecipe((1, 2), (300, 129), page_tokens=16), "float32", 17, 33, 8, 17, 2, 130, with_lens=True, sink=1.0
    ),
    AttentionRecipe(
        BatchRecipe((2,), (400,), page_tokens=64), num_heads=16, head_dim=64, sliding_window=64, index_topk=64, sink=1.0
    ),
    AttentionRecipe(
        BatchRecipe((35, 1), (60, 3)), num_heads=2, sliding_window=20, index_topk=33, pattern="front", q_amplitude=4.0
    ),
    AttentionRecipe(
        BatchRecipe((1, 1), (63, 255), decode=True), num_heads=65, head_dim=24, sliding_window=128, compress_ratio=0
    ),
    AttentionRecipe(
        BatchRecipe((2,), (200,), page_tokens=64),
        cache_layout="released",
        num_heads=2,
        head_dim=512,
        rope_dim=64,
        sliding_window=128,
        compress_ratio=2,
        index_topk=70,
        pattern="valid",
    ),
    AttentionRecipe(
        BatchRecipe((2,), (200,), page_tokens=64), "float32", 64, 512, 64, 128, 2, 70, pattern="valid", sink=1.0
    ),
)
"""The last one has the released dims, which every operator is expected to serve."""


LARGE = (
    tile_borders(SIZES),
    ExplicitCase("article", "more than the roundings that are unavoidable: low precision where nobody looks", article),
    ExplicitCase("64-bit-offsets", "offsets in 32 bits: a pool past 2^31 elements wraps around", far_pages),
)
