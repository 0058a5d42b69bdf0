"""Caches in layout `released`: everything is, bit by bit, what it is with plain caches of quantised values."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine_fixtures import LONGEST, golden_tokens, poison, pools, runner_of, text_tokens
from golden_sets import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from minideepinfer import LLM, EngineConfig, SamplingParams
from minideepinfer.cache.layouts import LAYOUTS
from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.config import ModelConfig
from minideepinfer.operators import TOKEN_INDICES, load_registry, resolve
from minideepinfer.operators.build import build
from minideepinfer.operators.plan import PlannedOperator
from minideepinfer.operators.support import obstacles
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.problems import layer_problems
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.golden import verify
from minideepinfer.testing.recipes.attention import AttentionRecipe
from minideepinfer.testing.recipes.indexer import IndexerRecipe
from minideepinfer.testing.strategies import attention_recipes, indexer_recipes
from minideepinfer.testing.tensors import same_bits
from test_cache import FIRST, OTHER, request, run
from torch import Tensor

PLAIN = {"float32": "float32", "bfloat16": "bf16"}
DTYPES = pytest.mark.parametrize("dtype", PLAIN)


def runner(name: str, layout: str, dtype: str = "bfloat16", replay: str = "full", **settings: Any) -> Runner:
    """A runner whose caches hold nothing but NaN."""
    pages = (("layout", layout), *settings.pop("cache", ()))
    found = runner_of(name, "released", replay, dtype=dtype, cache=pages, **settings)
    poison(found)
    return found


def entries(runner: Runner) -> dict[str, Tensor]:
    """All entries as numbers of the compute dtype; NaN where nothing was written."""
    cache, dtype = runner.cache, runner.model.dtype
    layout = cache.layout
    found = {f"window {n}": layout.window.decode(pool, dtype) for n, pool in enumerate(cache.window)}
    found |= {f"main {n}": layout.main.decode(pool, dtype) for n, pool in cache.main.items()}
    return found | {f"index {n}": layout.index.decode(pool, dtype) for n, pool in cache.index_keys.items()}


@DTYPES
@pytest.mark.parametrize("chunks", [[90], [30, 7, 1, 22, 30]], ids=["whole", "chunks"])
@pytest.mark.parametrize("replay", ["full", "bounded"])
def test_logits_and_entries_are_bitwise_those_of_plain_caches(dtype: str, chunks: list[int], replay: str) -> None:
    """Several requests, prefill in chunks, then decoding; more tokens than a ring has slots."""
    results = []
    for layout in ("released", PLAIN[dtype]):
        model = runner("tiny-a", layout, dtype, replay)
        ours, theirs = request(0, 0, FIRST), request(1, 1, OTHER)
        for each in (ours, theirs):
            each.logits = "kept" if replay == "bounded" else "all"
        results.append((run(model, [ours, theirs], [*chunks[:-1], chunks[-1] - 6, 1, 1, 4]), entries(model)))
    (logits, packed), (expected, plain) = results
    for found, wanted in zip(logits, expected, strict=True):
        assert wanted.isfinite().all() and len(wanted) > 6
        assert same_bits(found, wanted)
    for name, values in plain.items():
        assert torch.equal(packed[name].isnan(), values.isnan()), name
        there = ~values.isnan()
        assert there.any() and same_bits(packed[name][there], values[there]), name


def test_a_longer_model_at_the_released_widths() -> None:
    """tiny-b has head_dim 512 and index_head_dim 128: entries of 528, 288 and 68 bytes."""
    ids = tuple(golden_tokens("tiny-b", LONGEST["tiny-b"]))
    scores = []
    for layout in ("released", "bf16"):
        model = runner("tiny-b", layout)
        engine = Engine(model)
        scored = engine.make_request(ids, len(ids), len(ids) - 20, "all")
        scores.append(torch.cat(engine.score([scored])[scored.request_id]))
        if layout == "released":
            cache = model.cache
            sizes = {pool.shape[-1] for pool in cache.window}, {pool.shape[-1] for pool in cache.main.values()}
            assert (*sizes, {pool.shape[-1] for pool in cache.index_keys.values()}) == ({528}, {288}, {68})
    assert same_bits(scores[0], scores[1])


@pytest.mark.parametrize("replay", ["full", "halo", "bounded"])
def test_prefix_hits(replay: str) -> None:
    """Found entries are read, the rings rebuilt, and shared bytes not written again."""
    first, rest = text_tokens("tiny-a", 1, 300), text_tokens("tiny-a", 2, 340)
    ids, found = first[:209] + rest[209:], []
    for layout in ("released", "bf16"):
        engine = Engine(runner("tiny-a", layout, replay=replay, cache=(("prefix", True),), max_tokens_per_step=97))
        cold = engine.make_request(first, 300, 300, "last")
        engine.score([cold])
        assert engine.prefixes is not None
        pages = engine.prefixes.lookup(first, 208)
        shared = [pool[pages].clone() for pool in _global_pools(engine)]
        warm = engine.make_request(ids, 340, 300, "kept")
        found.append(torch.cat(engine.score([warm])[warm.request_id]))
        assert engine.prefixes.statistics.hit_tokens == 208
        assert all(torch.equal(pool[pages], before) for pool, before in zip(_global_pools(engine), shared, strict=True))
    assert found[1].isfinite().all() and same_bits(found[0], found[1])


def _global_pools(engine: Engine) -> list[Tensor]:
    return [*engine.runner.cache.main.values(), *engine.runner.cache.index_keys.values()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_generated_tokens_of_the_trained_model(dtype: str) -> None:
    """Two forks of each prompt, which share pages and have copies of a ring."""
    prompts = ["The quick brown fox", "def main(", "Once upon a time, in a land"]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, logprobs=2, n=2)
    outputs = []
    for layout in ("released", PLAIN[dtype]):
        with LLM("tiny", EngineConfig(dtype=dtype, device="cpu", cache={"layout": layout, "num_pages": 32})) as llm:
            outputs.append([(output.token_ids, output.logprobs) for output in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]
    assert all(len(token_ids) == 24 for token_ids, _ in outputs[0])


@pytest.mark.parametrize("variant", ["fp32-q", "bf16-q"])
def test_golden_sets_are_verified_with_it(variant: str) -> None:
    reports = [
        verify(GOLDEN / "tiny-b", variants=[variant], sequences=["s5"], config=EngineConfig(cache={"layout": layout}))
        for layout in ("released", "auto")
    ]
    assert all(report.ok for report in reports)
    found, expected = (report.to_dict() for report in reports)
    assert found["cells"] == expected["cells"] and found["cells"]


def test_caches_shrink_as_the_formats_do() -> None:
    released, plain = (
        sum(pool.nbytes for pool in pools(runner("tiny-b", layout)) if pool.dtype != torch.float32)
        for layout in ("released", "bf16")
    )
    assert 1.9 < plain / released < 3.6


@cache
def naive(family: str) -> Any:
    return load_registry().get(family, "naive")


def built(family: str, problem: Any) -> Any:
    registered = naive(family)
    planned = PlannedOperator(registered, registered.declaration.options(), problem, "test", {})
    return build(planned, torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(attention_recipes(), st.sampled_from([32, 64, 96]))
def test_naive_attention_alone(recipe: AttentionRecipe, head_dim: int) -> None:
    case = replace(recipe, head_dim=head_dim).packed().build()
    dtype, layout = case.q.dtype, case.layout
    plain = replace(
        case,
        problem=replace(case.problem, cache_layout=PLAIN[case.problem.dtype]),
        window_ring=layout.window.decode(case.window_ring, dtype),
        global_kv=None if case.global_kv is None else layout.main.decode(case.global_kv, dtype),
    )
    assert case.window_ring.dtype == torch.uint8
    found, expected = (each.run(built("attention", each.problem)) for each in (case, plain))
    assert same_bits(found, expected)


@settings(max_examples=60, deadline=None)
@given(indexer_recipes(), st.sampled_from([32, 64, 96]))
def test_naive_indexer_alone(recipe: IndexerRecipe, head_dim: int) -> None:
    case = replace(recipe, head_dim=head_dim).packed().build()
    keys = LAYOUTS["released"].index.decode(case.index_keys, case.q.dtype)
    problem = replace(case.problem, cache_layout=PLAIN[case.problem.dtype])
    plain = replace(case, problem=problem, index_keys=keys)
    assert case.index_keys.dtype == torch.uint8
    found, expected = (each.run(built("indexer", each.problem)) for each in (case, plain))
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if found[1] is not None and expected[1] is not None:
        assert torch.equal(found[1], expected[1])


def test_fused_operators_serve_it_and_others_are_refused_by_name() -> None:
    """On the hardware that fused operators are made for `auto` takes them, as with plain caches."""
    config = EngineConfig(cache={"layout": "released"}, device="cpu", dtype="bfloat16")
    problems = layer_problems(ModelConfig.from_file(directory_of("tiny")), config, "cuda", (9, 0))
    plan = resolve(load_registry(), config, problems)
    for family in ("attention", "indexer"):
        assert {p.registered.name for key, p in plan.operators.items() if key[0] == family} == {"fused"}
        stranger = replace(naive(family).declaration, accepts={"cache": ("bf16",), "selection": (TOKEN_INDICES,)})
        problem = next(p for key, p in problems.items() if key[0] == family)
        assert obstacles(stranger, problem)[0] == "has cache layout released, needs bf16"
