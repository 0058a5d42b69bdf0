"""What `indexer: fused` is made of, on one GPU.

    python benchmarks/indexer.py [--output FILE]

The candidate source at the released sizes, at ratio 2, where 4,096 rows see up to 65,536 entries: each launch, torch's
top-k on the same scores, and one read of them. And which share of the 512 best entries by float32 scores is missed in
bfloat16, for unrounded normal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from minideepinfer.measure.costs.indexer import indexer_cost
from minideepinfer.measure.kernels.batches import prefill
from minideepinfer_indexer import naive
from minideepinfer_indexer.fused import FusedIndexer
from minideepinfer_indexer.launch import Launch
from minideepinfer_indexer.operands import Operands, to_e4m3
from parts import DEVICE, Parts, built, case_of, run
from torch import Tensor


def parts() -> Iterator[Parts]:
    """The launches, in both arithmetics."""
    recipe, case = case_of("indexer", "v41-rank", "source", compress_ratio=2)
    problem, batch = case.problem, case.batch
    exact, rounded = FusedIndexer(problem), FusedIndexer(problem, "fp8")
    prepared, prepared8 = exact.prepare(batch), rounded.prepare(batch)
    plan, tiling = prepared.metadata, exact._tiling
    launch, rows = Launch(problem, tiling, plan, plan.chunks[0]), plan.chunks[0].rows
    operands = Operands(case.q, case.head_weights, case.index_keys, plan.block_table)

    def converted() -> Operands:
        assert prepared8.pages is not None
        return to_e4m3(case.q, case.head_weights, case.index_keys, plan, prepared8.pages, tiling)

    operands8 = converted()
    boxes, boxes8 = exact._describe(operands), rounded._describe(operands8)
    indices = torch.empty(len(case.q), problem.topk, dtype=torch.int32, device=DEVICE)
    blocks = torch.empty(len(case.q), problem.candidate_topk_blocks, dtype=torch.int32, device=DEVICE)
    launch.score(operands, plan.visible, None, boxes)
    visible = plan.visible[rows.start : rows.stop]
    least = indexer_cost(problem, len(rows), int(visible.sum()), int(visible.max()))
    calls = {
        "scores, bf16": lambda: launch.score(operands, plan.visible, None, boxes),
        "scores, fp8": lambda: launch.score(operands8, plan.visible, None, boxes8),
        "copies in e4m3": converted,
        "top 512, block maxima given": lambda: launch.choose(indices, plan.visible, None),
        "top 2048 blocks": lambda: launch.choose_blocks(blocks),
        "torch.topk 512": lambda: launch.scores.topk(problem.topk, dim=1, sorted=False),
        "one read of the scores": lambda: launch.scores.amax(),
    }
    costs = {"scores, bf16": least, "scores, fp8": least.at("fp8")}
    yield Parts(f"source at ratio 2, {len(rows)} of {len(case.q)} rows", recipe, calls, costs, missed())


def missed(rows: int = 256, entries: int = 65536) -> dict[str, float]:
    """Mean share of the 512 best entries by float32 scores that each operator does not select."""
    _, case = case_of("indexer", "v41-rank", "plain", compress_ratio=1, batch=prefill(rows, entries))
    q, weights, keys = (
        torch.randn(tensor.shape, device=DEVICE) for tensor in (case.q, case.head_weights, case.index_keys)
    )
    case = replace(case, q=q.bfloat16(), head_weights=weights.bfloat16(), index_keys=keys.bfloat16())
    pages = case.batch.block_table[0, : entries // case.batch.page_tokens].long()
    flat = keys[pages].flatten(0, 1)
    scores = torch.stack([_exact(*row, flat) for row in zip(q, weights, strict=True)])
    hidden = torch.arange(scores.shape[1], device=DEVICE) >= case.batch.visible_entries(1)[:, None]
    best = scores.masked_fill(hidden, -torch.inf).topk(case.problem.topk, dim=1).indices
    operators = {"fused": FusedIndexer(case.problem), "naive": built(naive, case.problem)}
    return {f"missed by {name}": _missing(best, operator, case) for name, operator in operators.items()}


def _exact(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores of one row in float64, rounded to float32."""
    return (weights.double() @ (q.double() @ keys.double().T).relu_()).float()


def _missing(best: Tensor, operator: Any, case: Any) -> float:
    metadata = operator.prepare(case.batch)
    found = operator.run(case.q, case.head_weights, case.index_keys, None, metadata).selection.indices
    places = torch.zeros(len(best), int(best.max()) + 1, dtype=torch.bool, device=DEVICE)
    places.scatter_(1, found.long().clamp(0, places.shape[1] - 1), True)
    return 1 - float(places.gather(1, best).double().mean())


if __name__ == "__main__":
    run("indexer", __doc__, parts)
