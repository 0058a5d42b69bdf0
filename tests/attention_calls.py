"""Random attention calls that use every freedom of the protocol: what may not matter is NaN or garbage."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from minideepinfer.operators import TOKEN_INDICES, AttentionProblem, Batch, Phase, Selection
from torch import Tensor

HEADS, HEAD_DIM, ROPE_DIM, WINDOW, TOPK, PAGE_TOKENS = 3, 32, 8, 6, 9, 8


@dataclass(frozen=True)
class Call:
    """One call of an attention operator."""

    problem: AttentionProblem
    batch: Batch
    arguments: dict[str, Any]

    def run(self, operator: Any) -> Tensor:
        """Call an operator built for `problem`."""
        output: Tensor = operator.run(**self.arguments, metadata=operator.prepare(self.batch))
        return output


def random_call(
    seed: int, ratio: int, dtype: torch.dtype = torch.float32, with_sink: bool = True, with_lens: bool = True
) -> Call:
    """Some requests of different length and state, some without a row, one with padding rows behind it."""
    rng, values = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=values).to(dtype)

    seqlens = tuple(rng.choice([0, 1, 1, 2, 7]) for _ in range(rng.randint(0, 4)))
    context_lens = tuple(rng.choice([0, 1, 5, 13, 30]) for _ in seqlens)
    window_start = [rng.choice([0, -3, max(context - 2, 0)]) for context in context_lens]
    padding = rng.choice([0, 2]) if seqlens and seqlens[-1] else 0
    positions = [context + i for n, context in zip(seqlens, context_lens, strict=True) for i in range(n)]
    request_ids = [request for request, n in enumerate(seqlens) for _ in range(n)]
    if padding:
        positions, request_ids = positions + [-1] * padding, request_ids + [request_ids[-1]] * padding
        seqlens = (*seqlens[:-1], seqlens[-1] + padding)
    offsets = [0, *torch.tensor(seqlens, dtype=torch.int64).cumsum(0).tolist()]
    num_rows, num_requests = len(positions), len(seqlens)

    rings = rng.sample(range(num_requests + 2), num_requests)
    ring = torch.full((num_requests + 2, WINDOW + 3, HEAD_DIM), torch.nan, dtype=dtype)
    for request, context in enumerate(context_lens):
        for position in range(max(window_start[request], context - WINDOW + 1, 0), context):
            ring[rings[request], position % ring.shape[1]] = normal(HEAD_DIM)

    batch = Batch(
        phase=Phase.PREFILL,
        seqlens=seqlens,
        context_lens=context_lens,
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int64),
        request_ids=torch.tensor(request_ids, dtype=torch.int64),
        ring_table=torch.tensor(rings, dtype=torch.int64),
        window_start=torch.tensor(window_start, dtype=torch.int64),
        block_table=_block_table(rng, seqlens, context_lens),
        page_tokens=PAGE_TOKENS,
    )
    is_padding = batch.positions < 0
    q, new = normal(num_rows, HEADS, HEAD_DIM), normal(num_rows, HEAD_DIM)
    q[is_padding], new[is_padding] = torch.nan, torch.nan
    angles = torch.rand(num_rows, ROPE_DIM // 2, generator=values) * 6
    pool, selection = _selected(rng, batch, ratio, with_lens, normal) if ratio else (None, None)
    arguments = {
        "q": q,
        "window_new": new,
        "window_ring": ring,
        "global_kv": pool,
        "selection": selection,
        "sink": torch.randn(HEADS, generator=values) if with_sink else None,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "scale": HEAD_DIM**-0.5,
    }
    return Call(_problem(ratio, dtype), batch, arguments)


def _problem(ratio: int, dtype: torch.dtype) -> AttentionProblem:
    bfloat16 = dtype == torch.bfloat16
    return AttentionProblem(
        phase=Phase.PREFILL,
        device="cpu",
        capability=None,
        dtype="bfloat16" if bfloat16 else "float32",
        kv_quantization="none",
        activation_quantization="none",
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        rope_dim=ROPE_DIM,
        sliding_window=WINDOW,
        compress_ratio=ratio,
        index_topk=TOPK,
        page_tokens=PAGE_TOKENS,
        cache_layout="bf16" if bfloat16 else "float32",
        selection_layout=TOKEN_INDICES,
    )


def _block_table(rng: random.Random, seqlens: tuple[int, ...], context_lens: tuple[int, ...]) -> Tensor:
    """Pages in random order; what lies behind a request's last page is far out of bounds."""
    counts = [-(-(n + context) // PAGE_TOKENS) for n, context in zip(seqlens, context_lens, strict=True)]
    table = torch.full((len(counts), max(counts, default=0) + 1), 10**9, dtype=torch.int32)
    pages = rng.sample(range(sum(counts) + 1), sum(counts))
    for request, count in enumerate(counts):
        table[request, :count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
    return table


def _selected(rng: random.Random, batch: Batch, ratio: int, with_lens: bool, normal: Any) -> tuple[Tensor, Selection]:
    """A pool that is NaN but for the selected entries, and selections with invalid indices anywhere."""
    per_page = PAGE_TOKENS // ratio
    num_pages = 1 + batch.block_table[batch.block_table < 10**9].numel()
    pool = normal(num_pages, per_page, HEAD_DIM).fill_(torch.nan)
    rows, lens = [], []
    for row, visible in enumerate(batch.visible_entries(ratio).tolist()):
        valid = [rng.randrange(visible) for _ in range(rng.randint(0, TOPK))] if visible else []
        invalid = [rng.choice([-1, -1, -7, visible, visible + 3, 2**31 - 1]) for _ in range(TOPK - len(valid))]
        entries = rng.sample(valid + invalid, TOPK)
        length = rng.randint(0, TOPK) if with_lens else TOPK
        for entry in entries[:length]:
            if 0 <= entry < visible:
                page = batch.block_table[batch.request_ids[row], entry // per_page]
                if pool[page, entry % per_page].isnan().any():
                    pool[page, entry % per_page] = normal(HEAD_DIM)
        rows.append(entries)
        lens.append(length)
    indices = torch.tensor(rows, dtype=torch.int32).reshape(-1, TOPK)
    return pool, Selection(indices, torch.tensor(lens, dtype=torch.int32) if with_lens else None)
