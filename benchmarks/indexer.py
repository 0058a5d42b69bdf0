"""`indexer: fused` on one GPU: parts and whole beside naive, torch.topk, cuBLAS products and the floor, in one run.

    python benchmarks/indexer.py --commit HASH [--out benchmarks/results/DATE-h200-indexer.json]

The release's indexer: 32 heads x 128, top 512, 2048 candidate blocks of 8. Parts: 4096 rows that all see 65536 entries
at ratio 2, no causal mask. Whole: 4096 rows at the end of a context. Decode: one row a request, each with its own
context, in CUDA graphs, since launches from Python cost more than the work. The floor of scoring is its arithmetic at
this run's cuBLAS rate; of the top-k, one read of the scores; in decode, one read of the keys at 4.28 TB/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import ceilings, facts, in_ms, time_calls, write_record
from minideepinfer.operators import TOKEN_INDICES, Batch, IndexerProblem, Phase
from minideepinfer.quantization import qdq_mxfp4
from minideepinfer_indexer.fused import FusedIndexer
from minideepinfer_indexer.launch import Launch
from minideepinfer_indexer.naive import NaiveIndexer
from minideepinfer_indexer.operands import Operands, to_e4m3
from torch import Tensor

HEADS, DIM, TOPK, BLOCKS, BLOCK, PAGE_TOKENS = 32, 128, 512, 2048, 8, 64
READ_TB_S = 4.28


def problem(role: str = "plain", phase: Phase = Phase.PREFILL, ratio: int = 2) -> IndexerProblem:
    """The release's indexer in one role."""
    return IndexerProblem(
        phase=phase,
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        kv_quantization="released",
        activation_quantization="none",
        num_heads=HEADS,
        head_dim=DIM,
        compress_ratio=ratio,
        topk=TOPK,
        emits_candidates=role == "source",
        uses_candidates=role == "reindex",
        candidate_topk_blocks=BLOCKS,
        candidate_block_size=BLOCK,
        page_tokens=PAGE_TOKENS,
        cache_layout="bf16",
        selection_layout=TOKEN_INDICES,
    )


def make_batch(rows: int, context: int, requests: int, phase: Phase) -> Batch:
    """Equal requests whose last token is number `context`, pages in random order."""
    pages = -(-context // PAGE_TOKENS)
    each = torch.arange(context - rows, context, device="cuda")
    return Batch(
        phase=phase,
        seqlens=(rows,) * requests,
        context_lens=(context - rows,) * requests,
        cu_seqlens=torch.arange(requests + 1, device="cuda", dtype=torch.int32) * rows,
        positions=each.repeat(requests),
        request_ids=torch.arange(requests, device="cuda").repeat_interleave(rows),
        ring_table=torch.arange(requests, device="cuda"),
        window_start=torch.zeros(requests, dtype=torch.int64, device="cuda"),
        block_table=torch.randperm(requests * pages, device="cuda").int().view(requests, pages),
        page_tokens=PAGE_TOKENS,
    )


def inputs(batch: Batch, ratio: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, head weights and keys as the engine makes them, from normal numbers."""

    def quantized(*shape: int) -> Tensor:
        return torch.cat(
            [qdq_mxfp4(torch.randn(part, *shape[1:], device="cuda").bfloat16()) for part in split(shape[0])]
        )

    def split(number: int) -> list[int]:
        return [4096] * (number // 4096) + [number % 4096] * (number % 4096 > 0)

    q = quantized(batch.num_tokens, HEADS, DIM)
    weights = torch.randn(batch.num_tokens, HEADS, device="cuda").bfloat16()
    return q, weights, quantized(batch.block_table.numel(), PAGE_TOKENS // ratio, DIM)


def parts(rates: dict[str, float], rows: int = 4096, entries: int = 65536) -> dict[str, Any]:
    """Each launch alone, 4096 rows x 65536 entries."""
    batch = make_batch(rows, entries * 2, 1, Phase.PREFILL)
    q, weights, keys = inputs(batch)
    exact, fp8, source = FusedIndexer(problem()), FusedIndexer(problem(), "fp8"), FusedIndexer(problem("source"))
    prepared, prepared8 = exact.prepare(batch), fp8.prepare(batch)
    assert prepared8.pages is not None
    plan, tiling = prepared.metadata, exact._tiling
    plan.visible.fill_(entries)
    launch = Launch(problem("source"), source._tiling, plan, plan.chunks[0])
    operands = Operands(q, weights, keys, plan.block_table)
    operands8 = to_e4m3(q, weights, keys, plan, prepared8.pages, tiling)
    boxes, boxes8 = exact._describe(operands), fp8._describe(operands8)
    indices = torch.empty(rows, TOPK, dtype=torch.int32, device="cuda")
    blocks = torch.empty(rows, BLOCKS, dtype=torch.int32, device="cuda")
    launch.score(operands, plan.visible, None, boxes)
    times = time_calls(
        {
            "scores, bf16": lambda: launch.score(operands, plan.visible, None, boxes),
            "scores, fp8": lambda: launch.score(operands8, plan.visible, None, boxes8),
            "e4m3 copies": lambda: to_e4m3(q, weights, keys, plan, prepared8.pages, tiling),
            "top 512, block maxima given": lambda: launch.choose(indices, plan.visible, None),
            "top 2048 blocks": lambda: launch.choose_blocks(blocks),
            "torch.topk 512": lambda: launch.scores.topk(TOPK, dim=1, sorted=False),
            "one read of the scores": lambda: launch.scores.amax(),
            "naive bf16 formula": lambda: formula(q, weights, keys.view(-1, DIM)[:entries], launch.scores),
            "cuBLAS bf16 8192^3": cublas(),
        },
        repeats=10,
        warmup=1,
    )
    flops = 2 * rows * entries * HEADS * DIM
    return {
        "rows": rows,
        "entries": entries,
        "floor_bf16_ms": flops / rates["bf16_tflops"] / 1e9,
        "floor_fp8_ms": flops / rates["fp8_tflops"] / 1e9,
        "tflops_bf16": flops / times["scores, bf16"].median / 1e9,
        "tflops_fp8": flops / times["scores, fp8"].median / 1e9,
        "naive_over_scores_bf16": times["naive bf16 formula"].median / times["scores, bf16"].median,
        "torch_over_topk": times["torch.topk 512"].median / times["top 512, block maxima given"].median,
        "ms": in_ms(times),
    }


def cublas() -> Callable[[], Any]:
    """A product that measures the card as it is now."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ a


def formula(q: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    """What one writes in torch: bfloat16 products, 64 rows at a time."""
    for start in range(0, len(q), 64):
        products = torch.einsum("thd,nd->thn", q[start : start + 64], keys)
        out[start : start + 64] = (products.relu_() * weights[start : start + 64, :, None]).sum(1)


def whole(context: int, rows: int = 4096) -> dict[str, Any]:
    """All launches of one call."""
    batch = make_batch(rows, context, 1, Phase.PREFILL)
    q, weights, keys = inputs(batch)
    candidates = FusedIndexer(problem("source"))
    chosen = candidates.run(q, weights, keys, None, candidates.prepare(batch)).candidates
    calls: dict[str, Callable[[], Any]] = {}
    for arithmetic in ("bf16", "fp8"):
        for role in ("plain", "source", "reindex"):
            operator = FusedIndexer(problem(role), arithmetic)
            calls[f"{role}, {arithmetic}"] = bound(
                operator, q, weights, keys, chosen if role == "reindex" else None, batch
            )
    fused = time_calls(calls, repeats=5, warmup=1)
    naive = NaiveIndexer(problem("source"))
    slow = time_calls({"source, naive": bound(naive, q, weights, keys, None, batch)}, repeats=1, warmup=1)
    return {"rows": rows, "context": context, "ms": in_ms({**fused, **slow})}


def bound(operator: Any, q: Tensor, weights: Tensor, keys: Tensor, chosen: Tensor | None, batch: Batch) -> Any:
    """A call without arguments; `prepare` is done."""
    prepared = operator.prepare(batch)
    return lambda: operator.run(q, weights, keys, chosen, prepared)


def decode(context: int, requests: int) -> dict[str, Any]:
    """One row a request."""
    batch = make_batch(1, context, requests, Phase.DECODE)
    q, weights, keys = inputs(batch)
    operator, naive = FusedIndexer(problem(phase=Phase.DECODE)), NaiveIndexer(problem(phase=Phase.DECODE))
    times = time_calls({"plain": bound(operator, q, weights, keys, None, batch)}, repeats=20)
    times |= time_calls({"naive": bound(naive, q, weights, keys, None, batch)}, repeats=2, warmup=1)
    floor = requests * (context // 2) * DIM * 2 / READ_TB_S / 1e9
    return {"requests": requests, "context": context, "floor_ms": floor, "ms": in_ms(times)}


def overlap(rows: int = 256, entries: int = 65536) -> dict[str, float]:
    """Mean part of the 512 best entries by float32 scores of unrounded normal numbers that each arithmetic selects."""
    batch = make_batch(rows, entries, 1, Phase.PREFILL)
    q, w, k = (torch.randn(*shape, device="cuda") for shape in ((rows, HEADS, DIM), (rows, HEADS), (entries, DIM)))
    table = batch.block_table[0].long()
    pool = torch.empty(len(table), PAGE_TOKENS, DIM, device="cuda")
    pool[table] = k.view(-1, PAGE_TOKENS, DIM)
    rounded = [tensor.bfloat16() for tensor in (q, w, pool)]
    found = {}
    for name, operator in (
        ("fused", FusedIndexer(problem(ratio=1))),
        ("naive", NaiveIndexer(problem(ratio=1))),
    ):
        found[name] = bound(operator, *rounded, None, batch)().selection.indices
    visible = batch.visible_entries(1)
    found["bf16 formula"] = best(reference_rounding(rounded[0], rounded[1], k.bfloat16()), visible)
    expected = best(torch.stack([exact_row(q[row], w[row], k) for row in range(rows)]), visible)
    return {name: shared(indices, expected) for name, indices in found.items()}


def exact_row(q: Tensor, w: Tensor, k: Tensor) -> Tensor:
    """Scores of one row in float64, rounded to float32."""
    return (w.double() @ (q.double() @ k.double().T).relu_()).float()


def reference_rounding(q: Tensor, w: Tensor, k: Tensor) -> Tensor:
    """Spec 3.6: products and weighted products rounded to bfloat16, summed in float32, the sum rounded again."""
    rows = []
    for row in range(len(q)):
        products = (q[row] @ k.T).relu_()
        rows.append((products * w[row, :, None]).float().sum(0).bfloat16())
    return torch.stack(rows).float()


def best(scores: Tensor, visible: Tensor) -> Tensor:
    """The best entries that a row sees."""
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible[:, None]
    return scores.masked_fill(hidden, -torch.inf).topk(TOPK, dim=1).indices


def shared(found: Tensor, expected: Tensor) -> float:
    """Mean part of the expected numbers that were found."""
    both = [len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), expected.tolist(), strict=True)]
    return sum(both) / len(both)


def main() -> None:
    """Measure, print and, if asked, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    before = ceilings()
    record: dict[str, Any] = {**facts(arguments.commit), "ceilings_before": before}
    record["parts"] = parts(before)
    record["whole"] = [whole(131072)]
    record["decode"] = [decode(context, requests) for context in (4096, 131072) for requests in (1, 8, 64)]
    record["overlap_with_float32"] = overlap()
    record["ceilings_after"] = ceilings()
    for name, value in record.items():
        for part in value if isinstance(value, list) else [value]:
            print(name, part, flush=True)
    if arguments.out:
        write_record(arguments.out, record)


if __name__ == "__main__":
    main()
