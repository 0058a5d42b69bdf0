"""`naive`: the reference indexer, dense scores over all of a request's entries (spec 3.6, 3.7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from minideepinfer.cache.layouts import EntryFormat, cache_layout
from minideepinfer.operators import Batch, BuildContext, IndexerOutput, Selection
from minideepinfer.operators.problem import IndexerProblem
from torch import Tensor

_MAX_SCORES = 1 << 25
"""Scores held at once; bounds memory at long contexts."""


@dataclass(frozen=True)
class _Request:
    """One request's rows in the batch, its entries that some row sees, and its number in the batch."""

    index: int
    rows: range
    num_entries: int


@dataclass(frozen=True, eq=False)
class _Metadata:
    batch: Batch
    visible: Tensor
    requests: tuple[_Request, ...]


class NaiveIndexer:
    """See `IndexerOperator`.

    Scores are accumulated in float64 and rounded once to float32. Dot products of bfloat16 or quantise-dequantised
    vectors are then exact, so a score does not depend on the shapes of the matrix product it was computed in.
    """

    def __init__(self, problem: IndexerProblem) -> None:
        self._problem = problem
        self._keys = cache_layout(problem.cache_layout).index

    def prepare(self, batch: Batch) -> _Metadata:
        """Find out how many entries each request shows."""
        visible = batch.visible_entries(self._problem.compress_ratio)
        requests, start = [], 0
        for index, length in enumerate(batch.seqlens):
            if length:
                rows = range(start, start + length)
                requests.append(_Request(index, rows, int(visible[start : start + length].max())))
            start += length
        return _Metadata(batch, visible, tuple(requests))

    def run(
        self, q: Tensor, head_weights: Tensor, index_keys: Tensor, candidates: Tensor | None, metadata: _Metadata
    ) -> IndexerOutput:
        """See `IndexerOperator.run`."""
        problem, tokens = self._problem, q.shape[0]
        indices = torch.full((tokens, problem.topk), -1, dtype=torch.int32, device=q.device)
        blocks = torch.full((tokens, problem.candidate_topk_blocks), -1, dtype=torch.int32, device=q.device)
        for request in metadata.requests:
            pages = metadata.batch.block_table[request.index]
            keys = _logical_keys(index_keys, self._keys, pages, request.num_entries)
            step = max(1, _MAX_SCORES // max(1, request.num_entries))
            for start in range(request.rows.start, request.rows.stop, step):
                rows = slice(start, min(start + step, request.rows.stop))
                scores = _scores(q[rows], head_weights[rows], keys, metadata.visible[rows])
                if problem.emits_candidates:
                    blocks[rows] = self._candidate_blocks(scores, metadata.visible[rows])
                if candidates is not None:
                    scores = self._restrict(scores, candidates[rows])
                indices[rows] = _best(scores, problem.topk)
        return IndexerOutput(Selection(indices), blocks if problem.emits_candidates else None)

    def _candidate_blocks(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Best blocks by their best entry, the newest visible one pinned: int32 `[n, candidate_topk_blocks]`."""
        size = self._problem.candidate_block_size
        padded = F.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        best = padded.view(len(scores), -1, size).amax(-1)
        newest = (visible.unsqueeze(1) - 1).div(size, rounding_mode="floor")  # -1 if nothing is visible
        numbers = torch.arange(best.shape[1], device=best.device)
        return _best(best.masked_fill(numbers == newest, torch.inf), self._problem.candidate_topk_blocks)

    def _restrict(self, scores: Tensor, candidates: Tensor) -> Tensor:
        """Scores with everything outside the candidate blocks at -inf."""
        size = self._problem.candidate_block_size
        num_blocks = -(-scores.shape[1] // size)
        named = (candidates >= 0) & (candidates < num_blocks)
        allowed = torch.zeros(len(scores), num_blocks + 1, dtype=torch.bool, device=scores.device)
        allowed.scatter_(1, candidates.long().where(named, num_blocks), True)  # the last column is nobody's
        entries = allowed[:, :num_blocks].repeat_interleave(size, dim=1)[:, : scores.shape[1]]
        return scores.masked_fill(~entries, -torch.inf)


def _logical_keys(pool: Tensor, form: EntryFormat, pages: Tensor, num_entries: int) -> Tensor:
    """A request's first entries in logical order, float64 `[num_entries, d]`."""
    per_page = pool.shape[1]
    entries = torch.arange(num_entries, device=pool.device)
    keys = pool[pages.long()[entries // per_page], entries % per_page]
    return form.decode(keys, torch.float32).double()


def _scores(q: Tensor, head_weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """float32 `[n, num_entries]`, -inf where a row does not see the entry."""
    total = torch.zeros(len(q), len(keys), dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        total += (q[:, head].double() @ keys.T).relu_() * head_weights[:, head, None].double()
    entries = torch.arange(len(keys), device=q.device)
    return total.float().masked_fill(entries >= visible.unsqueeze(1), -torch.inf)


def _best(scores: Tensor, count: int) -> Tensor:
    """The `count` best columns above -inf, the lower one first among equals: int32 `[n, count]`, -1 behind them."""
    values, columns = scores.sort(dim=-1, descending=True, stable=True)
    best = columns[:, :count].where(values[:, :count] > -torch.inf, -1).int()
    return F.pad(best, (0, count - best.shape[1]), value=-1)


def build(context: BuildContext) -> NaiveIndexer:
    """Build `naive`."""
    return NaiveIndexer(context.problem)
