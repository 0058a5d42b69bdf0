"""Indexer and attention one after the other, over the same requests and pages; what lies between is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import Batch, Problem, Selection
from minideepinfer.testing.recipes.attention import AttentionCase, AttentionRecipe, fill_readable
from minideepinfer.testing.recipes.batch import NO_REQUESTS, BatchRecipe
from minideepinfer.testing.recipes.indexer import IndexerCase, IndexerRecipe


@dataclass(frozen=True)
class ChainCase:
    """A call of an indexer and one of an attention operator, whose selection is what the indexer returns.

    Attributes:
        tested: family of the operator under test; the other one is its partner's.
    """

    indexer: IndexerCase
    attention: AttentionCase
    tested: str = "indexer"

    @property
    def problem(self) -> Problem:
        """Of the operator under test."""
        return self.indexer.problem if self.tested == "indexer" else self.attention.problem

    @property
    def partner_problem(self) -> Problem:
        """Of the partner."""
        return self.attention.problem if self.tested == "indexer" else self.indexer.problem

    @property
    def batch(self) -> Batch:
        """The packed rows of both."""
        return self.indexer.batch

    @property
    def units(self) -> int:
        """Requests."""
        return self.indexer.units

    def run(self, indexer: Any, attention: Any) -> dict[str, Tensor]:
        """Call both operators."""
        call = self.indexer
        metadata = indexer.prepare(call.batch)
        output = indexer.run(call.q, call.head_weights, call.index_keys, call.candidates, metadata)
        heads = replace(self.attention, selection=output.selection).run(attention)
        return {"heads": heads} if output.candidates is None else {"heads": heads, "candidates": output.candidates}

    def take(self, order: Sequence[int]) -> tuple[ChainCase, Tensor]:
        """Some requests in another order, and which old row each new row is."""
        indexer, rows = self.indexer.take(order)
        return replace(self, indexer=indexer, attention=self.attention.take(order)[0]), rows

    def split(self) -> tuple[tuple[ChainCase, Tensor], tuple[ChainCase, Tensor]]:
        """Two steps instead of one."""
        (head, first), (tail, rest) = self.indexer.split()
        (a_head, _), (a_tail, _) = self.attention.split()
        return (replace(self, indexer=head, attention=a_head), first), (
            replace(self, indexer=tail, attention=a_tail),
            rest,
        )

    def in_layout(self, layout: str) -> ChainCase:
        """The same calls with another layout of what lies between."""
        indexer = replace(self.indexer, problem=replace(self.indexer.problem, selection_layout=layout))
        attention = replace(self.attention, problem=replace(self.attention.problem, selection_layout=layout))
        return replace(self, indexer=indexer, attention=attention)


def complete(
    indexer: IndexerCase, batch: BatchRecipe, tested: str, layout: str, dims: tuple[int, int, int] = (2, 32, 8)
) -> ChainCase:
    """An indexer call, made with seed 0, with an attention call behind it.

    Args:
        indexer: the call.
        batch: its recipe.
        tested: see `ChainCase`.
        layout: of what lies between.
        dims: heads, head_dim and rope_dim.
    """
    problem, (heads, head_dim, rope_dim) = indexer.problem, dims
    visible = indexer.batch.visible_entries(problem.compress_ratio)
    everything = torch.arange(int(visible.max()) if len(visible) else 0, dtype=torch.int32)
    recipe = AttentionRecipe(
        batch,
        problem.dtype,
        heads,
        head_dim,
        rope_dim,
        compress_ratio=problem.compress_ratio,
        index_topk=problem.topk,
        pattern="none",
        sink=1.0,
    )
    case = recipe.build()
    readable = replace(case, selection=Selection(everything.expand(len(visible), -1)))
    fill_readable(readable, torch.Generator().manual_seed(1))
    return ChainCase(indexer, replace(case, selection=None), tested).in_layout(layout)


@dataclass(frozen=True)
class ChainRecipe:
    """Makes both calls; the field names are those of `IndexerRecipe`, of `AttentionProblem`, and `ChainCase`."""

    batch: BatchRecipe = NO_REQUESTS
    dtype: str = "float32"
    tested: str = "indexer"
    layout: str = "token_indices/1"
    num_heads: int = 1
    head_dim: int = 32
    rope_dim: int = 8
    index_heads: int = 1
    index_head_dim: int = 16
    compress_ratio: int = 1
    topk: int = 3
    role: str = "plain"
    candidate_topk_blocks: int = 2
    candidate_block_size: int = 2
    numbers: str = "few"

    def build(self) -> ChainCase:
        """The calls."""
        indexer = IndexerRecipe(
            self.batch,
            self.dtype,
            self.index_heads,
            self.index_head_dim,
            self.compress_ratio,
            self.topk,
            self.role,
            self.candidate_topk_blocks,
            self.candidate_block_size,
            self.numbers,
        )
        return complete(
            indexer.build(), self.batch, self.tested, self.layout, (self.num_heads, self.head_dim, self.rope_dim)
        )
