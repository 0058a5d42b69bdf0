"""Attention operators on one GPU, beside naive, their parts, cuBLAS and the floors, in one run.

    python benchmarks/attention.py --commit HASH [--out benchmarks/results/DATE-h200-attention.json]

Prefill: 4096 new rows behind a context of 126,976, 64 heads x 512, bfloat16; 512 selected entries at random (ratio 2)
and 128 window entries, or the window alone. Decode: T requests of one row each, in CUDA graphs, since a launch from
Python costs more than the work. Errors are norm(out - ref) / norm(ref) of 64 rows against the float32 reference on the
same numbers. The floor of sparse prefill is a kernel that only adds up the keys gathered; that of the window-only layer
the copy of q to the output; that of decode its bytes at this run's copy rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_timing import ceilings, facts, graphed, in_ms, time_calls, write_record
from minideepinfer.operators import TOKEN_INDICES, AttentionProblem, Batch, BuildContext, OperatorOptions, Selection
from minideepinfer.operators.declaration import Phase
from minideepinfer_attention import direct, fused, naive
from minideepinfer_attention.rows import pool_rows, window_buffer, window_layout
from minideepinfer_attention.sparse import sparse_attention
from minideepinfer_attention.window import WindowTile, WindowTiles, window_attention
from torch import Tensor

HEADS, DIM, ROPE, WINDOW, TOPK, PAGE, RING = 64, 512, 64, 128, 512, 64, 134
DEVICE = torch.device("cuda")
ROW_BYTES = 2 * DIM


def problem(ratio: int, phase: Phase) -> AttentionProblem:
    """The release's attention."""
    return AttentionProblem(
        phase=phase,
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        kv_quantization="none",
        activation_quantization="none",
        num_heads=HEADS,
        head_dim=DIM,
        rope_dim=ROPE,
        sliding_window=WINDOW,
        compress_ratio=ratio,
        index_topk=TOPK,
        page_tokens=PAGE,
        cache_layout="bf16",
        selection_layout=TOKEN_INDICES,
    )


def random_call(seqlens: list[int], context: int, ratio: int, phase: Phase) -> tuple[Batch, dict[str, Any]]:
    """Requests with one context, their pages shuffled: the batch, and the arguments of `run` without metadata."""
    requests, tokens = len(seqlens), sum(seqlens)
    pages = [-(-(context + length) // PAGE) for length in seqlens]
    table = torch.zeros(requests, max(pages), dtype=torch.int32, device=DEVICE)
    free = iter(torch.randperm(sum(pages), device=DEVICE).int().split(pages))
    for request, count in enumerate(pages):
        table[request, :count] = next(free)
    positions = torch.cat([torch.arange(context, context + length, device=DEVICE) for length in seqlens])
    request_ids = torch.repeat_interleave(torch.tensor(seqlens, device=DEVICE))
    batch = Batch(
        phase=phase,
        seqlens=tuple(seqlens),
        context_lens=(context,) * requests,
        cu_seqlens=torch.tensor([0, *seqlens], device=DEVICE).cumsum(0).int(),
        positions=positions,
        request_ids=request_ids,
        ring_table=torch.randperm(requests, device=DEVICE),
        window_start=torch.zeros(requests, dtype=torch.int64, device=DEVICE),
        block_table=table,
        page_tokens=PAGE,
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    pool = selection = None
    if ratio:
        visible = batch.visible_entries(ratio)[:, None]
        selection = Selection((torch.rand(tokens, TOPK, device=DEVICE) * visible).int())
        pool = normal(sum(pages), PAGE // ratio, DIM)
    angles = torch.rand(tokens, ROPE // 2, device=DEVICE) * 6
    arguments = {
        "q": normal(tokens, HEADS, DIM),
        "window_new": normal(tokens, DIM),
        "window_ring": normal(requests, RING, DIM),
        "global_kv": pool,
        "selection": selection,
        "sink": torch.randn(HEADS, device=DEVICE),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "scale": DIM**-0.5,
    }
    return batch, arguments


def runner(module: Any, ratio: int, batch: Batch, arguments: dict[str, Any]) -> Callable[[], Tensor]:
    """A call of an operator, prepared."""
    operator = module.build(BuildContext(problem(ratio, batch.phase), OperatorOptions(), DEVICE))
    metadata = operator.prepare(batch)
    return lambda: operator.run(**arguments, metadata=metadata)


@triton.jit
def _gather_kernel(pool, rows, out, count, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the keys that one token names."""
    token, channel = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    total = tl.zeros([BLOCK, DIM], tl.float32)
    for start in range(0, count, BLOCK):
        row = tl.load(rows + token * count + start + tl.arange(0, BLOCK)).to(tl.int64)
        total += tl.load(pool + row[:, None] * DIM + channel[None, :]).to(tl.float32)
    tl.store(out + token * DIM + channel, tl.sum(total, 0))


def gather_sum(pool: Tensor, rows: Tensor) -> Tensor:
    """The floor of reading what `rows` names: float32 `[T, D]`."""
    out = torch.empty(len(rows), DIM, device=DEVICE)
    _gather_kernel[(len(rows),)](pool, rows, out, rows.shape[1], DIM=DIM, BLOCK=16, num_warps=4)
    return out


def sparse_calls(tokens: int) -> tuple[dict[str, Callable[[], Tensor]], dict[str, float]]:
    """Sparse prefill, whole and in parts; and errors."""
    batch, arguments = random_call([tokens], 126_976, 2, Phase.PREFILL)
    q, pool, selection = arguments["q"], arguments["global_kv"].flatten(0, 1), arguments["selection"]
    rest = [arguments[name] for name in ("sink", "scale")]
    layout, out = window_layout(batch, WINDOW), torch.empty_like(q)
    buffer = window_buffer(arguments["window_new"], arguments["window_ring"], layout)
    rows = pool_rows(selection, batch, 2, PAGE // 2)
    every = torch.cat([layout.rows.clamp(min=0), rows], 1)
    calls = {
        "sparse: fused": runner(fused, 2, batch, arguments),
        "sparse: indexed": runner(direct, 2, batch, arguments),
        "sparse: plain Triton kernel": lambda: sparse_attention(
            q, buffer, layout.rows, pool, rows, *rest, out, arguments["cos"], arguments["sin"]
        ),
        "sparse: window buffer": lambda: window_buffer(arguments["window_new"], arguments["window_ring"], layout),
        "sparse: rows of the pool": lambda: pool_rows(selection, batch, 2, PAGE // 2),
        "sparse: floor, gather and add": lambda: gather_sum(pool, every),
        "sparse: naive": runner(naive, 2, batch, arguments),
    }
    return calls, errors(calls, "sparse: ", 2, batch, arguments)


def window_calls(tokens: int) -> tuple[dict[str, Callable[[], Tensor]], dict[str, float]]:
    """The window-only layer, whole and in parts; and errors."""
    batch, arguments = random_call([tokens], 126_976, 0, Phase.PREFILL)
    q, tiles = arguments["q"], WindowTiles.of(batch, WindowTile.of(HEADS, DIM, WINDOW, torch.bfloat16), WINDOW)
    buffer = window_buffer(arguments["window_new"], arguments["window_ring"], tiles.layout)
    out = torch.empty_like(q)
    rest = [arguments[name] for name in ("sink", "scale", "cos", "sin")]
    calls = {
        "window: fused": runner(fused, 0, batch, arguments),
        "window: indexed": runner(direct, 0, batch, arguments),
        "window: plain Triton kernel": lambda: window_attention(q, buffer, tiles, *rest),
        "window: floor, copy of q": lambda: out.copy_(q),
        "window: naive": runner(naive, 0, batch, arguments),
    }
    return calls, errors(calls, "window: ", 0, batch, arguments)


def errors(
    calls: dict[str, Callable[[], Tensor]], prefix: str, ratio: int, batch: Batch, arguments: dict[str, Any]
) -> dict[str, float]:
    """norm(out - ref) / norm(ref) of 64 rows of what computes heads, against float32 on the same numbers."""
    wide = {
        name: value.float() if isinstance(value, Tensor) and name != "selection" else value
        for name, value in arguments.items()
    }
    kept = slice(batch.num_tokens - 64, batch.num_tokens)
    start = batch.num_tokens - 64
    selection = wide["selection"]
    # The last 64 rows as a step of their own; earlier ones stand in the ring.
    ring = wide["window_ring"].clone()
    earlier = batch.positions[max(0, start - RING) : start]
    ring[batch.ring_table[0], earlier % RING] = wide["window_new"][max(0, start - RING) : start]
    tail = replace(
        batch,
        seqlens=(64,),
        context_lens=(batch.context_lens[0] + start,),
        cu_seqlens=torch.tensor([0, 64], dtype=torch.int32, device=DEVICE),
        positions=batch.positions[kept],
        request_ids=batch.request_ids[kept],
    )
    wide |= {name: wide[name][kept] for name in ("q", "window_new", "cos", "sin")}
    wide |= {"window_ring": ring, "selection": selection and Selection(selection.indices[kept])}
    made = replace(problem(ratio, batch.phase), dtype="float32", cache_layout="float32")
    operator = naive.build(BuildContext(made, OperatorOptions(), DEVICE))
    expected = operator.run(**wide, metadata=operator.prepare(tail))
    names = [prefix + name for name in ("fused", "indexed", "plain Triton kernel", "naive")]
    return {
        name: float((calls[name]()[kept].float() - expected).norm() / expected.norm())
        for name in names
        if name in calls
    }


def decode_calls() -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """Decode of 1, 8 and 64 requests; and the bytes that each must move."""
    calls, moved = {}, {}
    for requests in (1, 8, 64):
        for context in (4096, 131_008):
            for ratio in (2, 0):
                batch, arguments = random_call([1] * requests, context, ratio, Phase.DECODE)
                name = f"decode T={requests} context={context} ratio={ratio}"
                calls[name] = graphed(runner(fused, ratio, batch, arguments))
                keys = WINDOW + (min(TOPK, context // ratio) if ratio else 0)
                moved[name] = requests * ROW_BYTES * (keys + 2 * HEADS)
    return calls, moved


def main() -> None:
    """Measure, print and, if asked, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    before = ceilings()
    a, b = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    sparse, sparse_errors = sparse_calls(arguments.tokens)
    window, window_errors = window_calls(arguments.tokens)
    fast = {name: call for name, call in {**sparse, **window}.items() if "naive" not in name}
    slow = {name: call for name, call in {**sparse, **window}.items() if "naive" in name}
    times = time_calls({**fast, "cuBLAS bf16 8192^3": lambda: a @ b}, arguments.repeats)
    times |= time_calls(slow, repeats=3, warmup=1)
    decode, moved = decode_calls()
    decode_times = time_calls(decode, arguments.repeats)
    record = {
        **facts(arguments.commit),
        "what": f"attention, bfloat16, {arguments.tokens} rows, {HEADS} heads x {DIM}, {TOPK} + {WINDOW} keys",
        "forms": fused.build(BuildContext(problem(2, Phase.PREFILL), OperatorOptions(), DEVICE)).form,
        "before": before,
        "after": ceilings(),
        "prefill_ms": in_ms(times),
        "errors": {**sparse_errors, **window_errors},
        "naive_over_fused": {
            name: times[f"{name}: naive"].median / times[f"{name}: fused"].median for name in ("sparse", "window")
        },
        "decode_ms": in_ms(decode_times),
        "decode_floor_ms": {name: round(count / before["copy_tb_s"] / 1e9, 5) for name, count in moved.items()},
    }
    for group in ("prefill_ms", "decode_ms"):
        for name, (_, median, _) in record[group].items():
            print(f"{median:9.4f} ms  {name}")
    print({name: value for name, value in record.items() if not name.endswith("_ms")})
    if arguments.out:
        write_record(arguments.out, record)


if __name__ == "__main__":
    main()
