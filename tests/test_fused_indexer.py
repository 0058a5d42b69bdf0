"""Fused indexer, interpreted: what the conformance kit's small calls do not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from minideepinfer.cache.layouts import cache_layout
from minideepinfer.errors import OperatorError
from minideepinfer.operators import BuildContext
from minideepinfer.quantization import qdq_mxfp4
from minideepinfer.testing.recipes.batch import CPU, BatchRecipe
from minideepinfer.testing.recipes.indexer import IndexerCase, IndexerRecipe
from minideepinfer_indexer import launch as launches
from minideepinfer_indexer import naive, tiling
from minideepinfer_indexer.fused import FusedIndexer, build
from minideepinfer_indexer.launch import Launch
from minideepinfer_indexer.limits import FusedOptions, refuses
from minideepinfer_indexer.operands import PageList, to_e4m3
from torch import Tensor

INF, NAN = float("inf"), float("nan")


def topk_of(scores: Tensor, visible: list[int], topk: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the top-k chooses from given scores."""
    monkeypatch.setattr(launches, "TILE", tile)
    batch = BatchRecipe((1,) * len(scores), tuple(v - 1 for v in visible), page_tokens=64)
    case = IndexerRecipe(batch, topk=topk, num_heads=1, head_dim=16).build()
    metadata = tiling.plan(case.problem, tiling.Tiling.of(case.problem), case.batch)
    launch = Launch(case.problem, tiling.Tiling.of(case.problem), metadata, metadata.chunks[0])
    launch.scores.fill_(INF)  # what lies past a row's length must not matter
    launch.scores[:, : scores.shape[1]] = scores
    shown = launch.scores.masked_fill(torch.arange(launch.scores.shape[1]) >= metadata.visible[:, None], -INF)
    shown = shown.nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
    launch.maxima = shown.unflatten(1, (-1, 8)).amax(-1)
    launch.tops = shown.unflatten(1, (-1, tiling.TOP)).amax(-1)
    indices = torch.full((len(scores), topk), 7, dtype=torch.int32)
    launch.choose(indices, metadata.visible, None)
    return indices


def by_sorting(scores: Tensor, visible: list[int], topk: int) -> Tensor:
    chosen = []
    for row, length in zip(scores.tolist(), visible, strict=True):
        ranked = sorted((-score, entry) for entry, score in enumerate(row[:length]) if score > -INF)
        best = sorted(entry for _, entry in ranked[:topk])
        chosen.append(best + [-1] * (topk - len(best)))
    return torch.tensor(chosen, dtype=torch.int32)


@pytest.mark.parametrize("tile", [1 << 13, 16], ids=["two levels", "three levels"])
@pytest.mark.parametrize(
    ("topk", "width"), [(1, 300), (5, 1100), (20, 1100), (16, 64), (33, 20)], ids=lambda number: str(number)
)
def test_topk_is_exact_with_the_lower_index_among_equals(
    topk: int, width: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(topk)
    few = torch.randint(-3, 3, (1, width), generator=generator).float()
    rows = [torch.randn(1, width, generator=generator), few, few * 0.0, torch.zeros(1, width), -few.abs() * 1e-40]
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 3e38, -3e38])
    rows.append(special[torch.randint(0, len(special), (1, width), generator=generator)])
    scores, visible = torch.cat(rows), [width, width - 1, width // 2 + 1, 3, width, width]
    found = topk_of(scores, visible, topk, tile, monkeypatch)
    assert torch.equal(found, by_sorting(scores, visible, topk))


def agrees(case: IndexerCase) -> tuple[Tensor, Tensor | None]:
    """`fused` chooses what `naive` chooses."""
    found, expected = case.run(FusedIndexer(case.problem)), case.run(naive.NaiveIndexer(case.problem))
    assert torch.equal(found[0].sort(1).values, expected[0].sort(1).values)
    if expected[1] is not None:
        assert found[1] is not None
        assert torch.equal(found[1].sort(1).values, expected[1].sort(1).values)
    return expected


@pytest.mark.parametrize("size", [2, 8, 64])
def test_candidates_of_long_rows(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "TILE", 16)
    batch = BatchRecipe((3, 2), (1200, 130), page_tokens=64)
    recipe = IndexerRecipe(batch, topk=20, num_heads=2, head_dim=16, numbers="few", candidate_block_size=size)
    source = replace(recipe, role="source", candidate_topk_blocks=6).build()
    _, blocks = agrees(source)
    reindex = replace(recipe, role="reindex", candidate_topk_blocks=6).build()
    agrees(replace(reindex, candidates=blocks))


def test_chunks_do_not_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = BatchRecipe((11, 9, 3), (70, 40, 300), page_tokens=16)
    case = IndexerRecipe(batch, topk=9, num_heads=3, head_dim=16, dtype="bfloat16").build()
    whole = case.run(FusedIndexer(case.problem))[0]
    monkeypatch.setattr(tiling, "WORKSPACE", 4 * 320 * 10)
    operator = FusedIndexer(case.problem)
    assert len(operator.prepare(case.batch).metadata.chunks) == 4  # tiles of 8, 3, 8 + 1 and 3 rows
    assert torch.equal(case.run(operator)[0], whole)


def mxfp4_case(spread: int, **recipe: object) -> IndexerCase:
    """Quantise-dequantised queries and keys; group exponents of a vector differ by up to `spread`."""
    case = IndexerRecipe(num_heads=2, head_dim=64, dtype="bfloat16", **recipe).build()  # type: ignore[arg-type]
    factor = torch.ones(64)
    factor[32:] = 2.0**-spread
    q, keys = (qdq_mxfp4(tensor.nan_to_num(1.0) * factor) for tensor in (case.q, case.index_keys))
    problem = replace(case.problem, kv_quantization="released")
    return replace(case, q=q, index_keys=keys, problem=problem)


@pytest.mark.parametrize("arithmetic", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", ["source", "reindex"])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_packed_keys_give_the_selection_of_plain_ones(
    head_dim: int, decode: bool, role: str, dtype: str, arithmetic: str
) -> None:
    """Scores are of the same numbers in the same order; a padding request owns no page."""
    batch = BatchRecipe((2, 3, 1), (190, 7, 70), padding=(1,), page_tokens=16, decode=decode)
    recipe = IndexerRecipe(
        batch, dtype, 3, head_dim, topk=20, role=role, candidate_topk_blocks=5, candidate_block_size=8
    )
    case = recipe.packed().build()
    keys = cache_layout("released").index.decode(case.index_keys, case.q.dtype)
    layout = "bf16" if dtype == "bfloat16" else "float32"
    plain = replace(case, index_keys=keys, problem=replace(case.problem, cache_layout=layout))
    found, expected = (each.run(FusedIndexer(each.problem, arithmetic)) for each in (case, plain))
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None) == (role == "reindex")
    if found[1] is not None and expected[1] is not None:
        assert torch.equal(found[1], expected[1])


def dequantized(case: IndexerCase) -> tuple[Tensor, Tensor]:
    """Queries and keys as `fp8` sees them, float32; keys of the first request in order."""
    shape = tiling.Tiling.of(case.problem)
    metadata = tiling.plan(case.problem, shape, case.batch)
    pages = PageList.of(metadata.counts, case.batch)
    operands = to_e4m3(case.q, case.head_weights, case.index_keys, metadata, pages, shape)
    assert operands.key_scales is not None
    scale = operands.head_weights / case.head_weights.float()
    keys = operands.keys.float() * operands.key_scales[..., None]
    return operands.q.float() * scale[..., None], keys[operands.block_table[0]].flatten(0, 1)[: metadata.counts[0]]


def test_e4m3_holds_mxfp4_values_exactly_within_its_range() -> None:
    batch = BatchRecipe((3,), (60,), page_tokens=16)
    for spread in (0, 5, 10):
        case = mxfp4_case(spread, batch=batch)
        q, keys = dequantized(case)
        assert torch.equal(q, case.q.float())
        assert torch.equal(keys, case.logical_keys(2).float())


def test_e4m3_rounds_what_lies_further_down() -> None:
    case = mxfp4_case(20, batch=BatchRecipe((3,), (60,), page_tokens=16))
    q, _ = dequantized(case)
    error, largest = (q - case.q.float()).abs().amax(-1), case.q.float().abs().amax(-1)
    assert error.max() > 0
    assert (error <= largest * 2.0**-18).all()


@pytest.mark.parametrize("role", ["plain", "source", "reindex"])
def test_fp8_selects_what_exact_scores_select(role: str) -> None:
    batch = BatchRecipe((5, 0, 2), (90, 8, 41), page_tokens=16)
    case = mxfp4_case(3, batch=batch, role=role, topk=12, candidate_block_size=4, candidate_topk_blocks=5)
    found = case.run(build(BuildContext(case.problem, FusedOptions(arithmetic="fp8"), CPU)))
    expected = case.run(naive.NaiveIndexer(case.problem))
    assert torch.equal(found[0].sort(1).values, expected[0].sort(1).values)


def test_fp8_is_refused_for_values_that_it_would_round() -> None:
    case = IndexerRecipe().build()
    with pytest.raises(OperatorError, match="kv_quantization none; it needs released"):
        build(BuildContext(case.problem, FusedOptions(arithmetic="fp8"), CPU))


def test_refusals_say_what_is_needed() -> None:
    problem = IndexerRecipe(role="source", candidate_block_size=2).build().problem
    assert refuses(problem) == []
    assert "needs a power of two up to 64" in refuses(replace(problem, candidate_block_size=3))[0]
    assert "needs a power of two up to 64" in refuses(replace(problem, candidate_block_size=128))[0]
    assert "needs a power of two of entries in a page" in refuses(replace(problem, page_tokens=24))[0]
    assert "needs a power of two of entries in a page" in refuses(replace(problem, page_tokens=9, compress_ratio=2))[0]
