"""Hypothesis strategies of recipes: every freedom that a contract gives, small."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from minideepinfer.operators import Quantization
from minideepinfer.testing.recipes.attention import PATTERNS, AttentionCase, AttentionRecipe
from minideepinfer.testing.recipes.batch import BatchRecipe
from minideepinfer.testing.recipes.comm import CommRecipe
from minideepinfer.testing.recipes.epilogue import NUMBERS, EpilogueRecipe, InjectRecipe
from minideepinfer.testing.recipes.indexer import ROLES, IndexerCase, IndexerRecipe
from minideepinfer.testing.recipes.moe import ROUTINGS, MoeCase, MoeRecipe
from minideepinfer.testing.recipes.residual import CALLS, PROJECTIONS, ResidualRecipe

BOTH = ("float32", "bfloat16")
SEEDS = st.integers(0, 2**31)


@st.composite
def batches(draw: st.DrawFn) -> BatchRecipe:
    """0 to 4 requests: empty ones, padding ones, fresh ones and continued ones; there may be no row."""
    decode = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(["real", "real", "real", "padding"]), max_size=4))
    context_lens = [draw(st.integers(1 if decode else 0, 45)) for _ in kinds]
    return BatchRecipe(
        seqlens=tuple(draw(st.integers(0, 3 if decode else 7)) for _ in kinds),
        context_lens=tuple(context_lens),
        window_start=tuple(draw(st.sampled_from([0, max(0, c - 2), c, c + 1])) for c in context_lens),
        padding=tuple(r for r, kind in enumerate(kinds) if kind == "padding"),
        page_tokens=draw(st.sampled_from([8, 16])),
        decode=decode,
    )


def attention_recipes(dtypes: tuple[str, ...] = BOTH) -> st.SearchStrategy[AttentionRecipe]:
    """Any legal attention call."""
    return st.builds(
        AttentionRecipe,
        batch=batches(),
        dtype=st.sampled_from(dtypes),
        num_heads=st.integers(1, 3),
        head_dim=st.sampled_from([8, 32, 24, 32, 24, 40, 64, 33]),
        rope_dim=st.sampled_from([4, 8]),
        sliding_window=st.integers(1, 9),
        compress_ratio=st.sampled_from([1, 2, 0]),
        index_topk=st.integers(1, 9),
        spare_slots=st.integers(0, 3),
        pattern=st.sampled_from(PATTERNS),
        with_lens=st.booleans(),
        sink=st.sampled_from([None, 1.0, 30.0]),
        q_amplitude=st.sampled_from([0.5, 4.0, 100.0, 0.0, 1e-25]),
        kv_amplitude=st.sampled_from([1.0, 1e-3, 1e3, 1e25, 1e-39]),
        seed=SEEDS,
    )


def indexer_recipes(dtypes: tuple[str, ...] = BOTH) -> st.SearchStrategy[IndexerRecipe]:
    """Any legal indexer call; half of them made of so few different numbers that ties are everywhere."""
    drawn = st.builds(
        IndexerRecipe,
        batch=batches(),
        dtype=st.sampled_from(dtypes),
        num_heads=st.integers(1, 4),
        head_dim=st.sampled_from([4, 16, 16, 24, 5, 32, 64]),
        compress_ratio=st.sampled_from([1, 2]),
        topk=st.integers(1, 12),
        role=st.sampled_from(ROLES),
        candidate_topk_blocks=st.integers(1, 6),
        candidate_block_size=st.sampled_from([2, 4, 8, 16, 3]),
        numbers=st.sampled_from(["normal", "normal", "few", "few", "zero"]),
        positive_weights=st.booleans(),
        q_amplitude=st.sampled_from([1.0, 1.0, 1e15, 1e-20]),
        key_amplitude=st.sampled_from([1.0, 1.0, 1e15, 1e-39]),
        kv_quantization=st.sampled_from(["none", "released"]),
        named=st.sampled_from(["any", "any", "none", "all"]),
        seed=SEEDS,
    )
    return drawn.map(lambda recipe: replace(recipe, kv_quantization="none") if recipe.head_dim % 32 else recipe)


@st.composite
def moe_recipes(
    draw: st.DrawFn, dtypes: tuple[str, ...] = BOTH, quantizations: tuple[str, ...] = ("none", "released")
) -> MoeRecipe:
    """Any legal MoE call of a rank that holds some of the experts."""
    experts = draw(st.integers(2, 6))
    local = draw(st.integers(1, experts))
    return MoeRecipe(
        tokens=draw(st.integers(0, 6)),
        dtype=draw(st.sampled_from(dtypes)),
        activation_quantization=draw(st.sampled_from(quantizations)),
        hidden_size=draw(st.sampled_from([32, 96, 160])),
        intermediate_size=draw(st.sampled_from([32, 96])),
        num_experts=experts,
        num_local_experts=local,
        expert_start=draw(st.integers(0, experts - local)),
        topk=draw(st.integers(1, min(3, experts))),
        routing=draw(st.sampled_from(["gate", "gate", "any", "any", *ROUTINGS])),
        shared=draw(st.booleans()),
        amplitude=draw(st.sampled_from([1.0, 20.0, 1e4, 1e-39])),
        few=draw(st.booleans()),
        seed=draw(SEEDS),
    )


def comm_recipes(dtypes: tuple[str, ...] = BOTH) -> st.SearchStrategy[CommRecipe]:
    """Any call on one rank."""
    return st.builds(
        CommRecipe,
        tokens=st.integers(0, 6),
        dtype=st.sampled_from(dtypes),
        hidden_size=st.sampled_from([1, 32, 103, 1030]),
        num_experts=st.integers(1, 9),
        topk=st.integers(1, 6),
        rows=st.integers(0, 9),
        row_bytes=st.sampled_from([1, 5, 264]),
        seed=SEEDS,
    )


def residual_recipes(dtypes: tuple[str, ...] = BOTH) -> st.SearchStrategy[ResidualRecipe]:
    """Any legal call of a residual operator."""
    return st.builds(
        ResidualRecipe,
        tokens=st.integers(0, 5),
        dtype=st.sampled_from(dtypes),
        call=st.sampled_from(("enter", "advance", *CALLS)),
        num_streams=st.integers(1, 4),
        hidden_size=st.sampled_from([1, 7, 32, 40, 103, 300]),
        sinkhorn_iterations=st.sampled_from([1, 2, 3, 20]),
        hc_eps=st.sampled_from([1e-6, 1e-6, 1e-2]),
        projection=st.sampled_from(PROJECTIONS),
        amplitude=st.sampled_from([1.0, 1.0, 1e-10, 1e3]),
        base=st.sampled_from([1.0, 8.0, 100.0]),
        scale=st.sampled_from([1.0, 0.1, 20.0]),
        decode=st.booleans(),
        seed=SEEDS,
    )


def epilogue_recipes(dtypes: tuple[str, ...] = BOTH) -> st.SearchStrategy[EpilogueRecipe | InjectRecipe]:
    """Any legal call of an epilogue operator, four of five of them `run`."""
    injected = st.builds(
        InjectRecipe,
        tokens=st.integers(0, 5),
        dtype=st.sampled_from(dtypes),
        streams=st.integers(1, 4),
        width=st.sampled_from([1, 7, 32, 103, 300]),
        amplitude=st.sampled_from([1.0, 1e-10, 1e3]),
        alike=st.sampled_from([0.0, 1.0, -1.0, 0.2]),
        decode=st.booleans(),
        seed=SEEDS,
    )
    return st.integers(0, 4).flatmap(lambda kind: injected if kind == 0 else finished_recipes(dtypes))


@st.composite
def finished_recipes(draw: st.DrawFn, dtypes: tuple[str, ...] = BOTH) -> EpilogueRecipe:
    """Any legal call of its `run`."""
    quantization: Quantization = draw(st.sampled_from(("none", "fp8", "mxfp4", "nvfp4")))
    widths = {"none": [1, 7, 32, 40, 103, 300], "nvfp4": [16, 48, 64, 144]}.get(quantization, [32, 64, 96, 320])
    width = draw(st.sampled_from(widths))
    return EpilogueRecipe(
        tokens=draw(st.integers(0, 5)),
        dtype=draw(st.sampled_from(dtypes)),
        heads=draw(st.integers(0, 3)),
        width=width,
        norm=draw(st.booleans()),
        pairs=0 if width % 2 else draw(st.sampled_from([0, width // 4, width // 2])),
        quantization=quantization,
        in_place=draw(st.booleans()),
        numbers=draw(st.sampled_from(NUMBERS)),
        amplitude=draw(st.sampled_from([1.0, 1.0, 1e-10, 1e3])),
        decode=draw(st.booleans()),
        seed=draw(SEEDS),
    )


def _name(dtype: torch.dtype) -> tuple[str, ...]:
    return (str(dtype).removeprefix("torch."),)


def attention_cases(dtype: torch.dtype = torch.float32) -> st.SearchStrategy[AttentionCase]:
    """Attention calls in one compute dtype."""
    return attention_recipes(_name(dtype)).map(AttentionRecipe.build)


def indexer_cases(dtype: torch.dtype = torch.float32) -> st.SearchStrategy[IndexerCase]:
    """Indexer calls in one compute dtype."""
    return indexer_recipes(_name(dtype)).map(IndexerRecipe.build)


def moe_cases(dtype: torch.dtype = torch.float32, activation_quantization: str = "none") -> st.SearchStrategy[MoeCase]:
    """MoE calls in one compute dtype."""
    return moe_recipes(_name(dtype), (activation_quantization,)).map(MoeRecipe.build)
