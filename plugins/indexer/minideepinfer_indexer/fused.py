"""`fused`: scores and their block maxima in one launch, an exact top-k that reads a few blocks of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from minideepinfer.errors import OperatorError
from minideepinfer.operators import Batch, BuildContext, Cost, IndexerOutput, Phase, Selection, interpreting
from minideepinfer.operators.problem import IndexerProblem
from torch import Tensor

from minideepinfer_indexer.launch import Launch
from minideepinfer_indexer.limits import FusedOptions
from minideepinfer_indexer.operands import Operands, PageList, to_e4m3, unpacked
from minideepinfer_indexer.tiling import Metadata, Tiling, plan


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Attributes: what every call needs, and where converted keys go, if they are converted."""

    metadata: Metadata
    pages: PageList | None


class FusedIndexer:
    """See `IndexerOperator`. A score that is -inf or NaN is never selected.

    Args:
        problem: what to serve.
        arithmetic: `bf16`: products of the operands as they are, summed in float32; `fp8`: of their copies in e4m3.
    """

    def __init__(self, problem: IndexerProblem, arithmetic: str = "bf16") -> None:
        self._problem = problem
        self._tiling = Tiling.of(problem)
        self._fp8 = arithmetic == "fp8"
        packed = problem.cache_layout == "released"
        # Where many rows read keys, these are unpacked once; few rows decode them as they read them.
        self._unpacks = packed and problem.phase is Phase.PREFILL
        self._gluon = not interpreting() and _suits_gluon(problem, self._fp8, packed and not self._unpacks)
        self.form = "gluon" if self._gluon else "triton, interpreted" if interpreting() else "triton"

    def prepare(self, batch: Batch) -> _Prepared:
        """Cut the batch into tiles and chunks."""
        metadata = plan(self._problem, self._tiling, batch)
        pages = None
        if (self._fp8 or self._unpacks) and metadata.num_entries:
            pages = PageList.of(metadata.counts, batch)
        return _Prepared(metadata, pages)

    def run(
        self, q: Tensor, head_weights: Tensor, index_keys: Tensor, candidates: Tensor | None, metadata: _Prepared
    ) -> IndexerOutput:
        """See `IndexerOperator.run`."""
        problem, pages, plan = self._problem, metadata.pages, metadata.metadata
        indices = q.new_empty(len(q), problem.topk, dtype=torch.int32)
        blocks = None
        if problem.emits_candidates:
            blocks = q.new_empty(len(q), problem.candidate_topk_blocks, dtype=torch.int32)
        if not plan.num_entries:
            return IndexerOutput(Selection(indices.fill_(-1)), None if blocks is None else blocks.fill_(-1))
        operands = Operands(q.contiguous(), head_weights.contiguous(), index_keys, plan.block_table)
        if pages is not None and self._fp8:
            operands = to_e4m3(operands.q, operands.head_weights, index_keys, plan, pages, self._tiling)
        elif pages is not None:
            operands = unpacked(operands, pages, self._tiling)
        descriptors = self._describe(operands)
        for chunk in plan.chunks:
            launch = Launch(problem, self._tiling, plan, chunk)
            lengths, pool = plan.visible, None
            if candidates is not None:
                lengths, pool = launch.pool(candidates.contiguous())
            launch.score(operands, lengths, pool, descriptors)
            if blocks is not None:
                launch.choose_blocks(blocks)
            launch.choose(indices, lengths, pool)
        return IndexerOutput(Selection(indices), blocks)

    def cost(self, call: Any, least: Cost) -> Cost:
        """What `bench kernel` is told: products in fp8 have their rate."""
        return least.at("fp8") if self._fp8 else least

    def _describe(self, operands: Operands) -> Any:
        """Descriptors for the copy engine; None if the kernel in plain Triton is to be used."""
        if not self._gluon:
            return None
        from minideepinfer_indexer.descriptor import describe

        return describe(operands, self._tiling)


def _suits_gluon(problem: IndexerProblem, fp8: bool, packed: bool) -> bool:
    """Whether this is Hopper, and queries and keys fit shared memory and come in boxes that the copy engine takes.

    Boxes are of 16 entries at least, a multiple of 16 bytes each, of numbers to be multiplied as they are.
    """
    if problem.capability != (9, 0) or problem.uses_candidates or problem.num_heads > 256 or problem.head_dim > 128:
        return False
    if fp8:
        return problem.head_dim % 16 == 0
    if packed:
        return False
    per_page = problem.page_tokens // problem.compress_ratio
    return problem.dtype == "bfloat16" and problem.head_dim % 8 == 0 and per_page >= 16


def build(context: BuildContext) -> FusedIndexer:
    """Build `fused`.

    Raises:
        OperatorError: fp8 arithmetic for vectors that are not quantise-dequantised.
    """
    problem, options = context.problem, context.options
    arithmetic = options.arithmetic if isinstance(options, FusedOptions) else "bf16"
    if arithmetic == "fp8" and problem.kv_quantization != "released":
        raise OperatorError(
            f"indexer:fused has arithmetic fp8 and kv_quantization {problem.kv_quantization}; it needs released, where "
            "index queries and keys are MXFP4 values, or arithmetic bf16"
        )
    return FusedIndexer(problem, arithmetic)
