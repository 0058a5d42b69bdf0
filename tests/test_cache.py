"""What the caches hold: the same bytes wherever they lie, rounded as they are read back; pending pairs.

What is true of stored bytes, with `kv_quantization` none or released: two runs whose steps hold the same rows in the
same order store the same bits and give the same logits, whatever pages and rings they use and whatever these held.
Steps of another shape (other chunks, other neighbours, or neighbours with other tokens, since experts then see other
numbers of rows) sum in another order: bytes may differ, with `released` only where a code flips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from engine_fixtures import poison, pools, runner_of, text_tokens, untouched
from minideepinfer.cache.pages import PageAllocator
from minideepinfer.model.compressor import Compressor
from minideepinfer.model.rows import Rows
from minideepinfer.operators import Phase
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import ScheduledRequest
from torch import Tensor

LENGTH = 90
PACKED = (("layout", "released"),)


@dataclass(frozen=True)
class Place:
    """Where a request keeps its state."""

    ring: int
    pages: tuple[int, ...]


def request(number: int, seed: int, place: Place) -> Request:
    ids = list(text_tokens("tiny-a", seed, LENGTH))
    return Request(number, ids, LENGTH, LENGTH, "all", ring=place.ring, pages=list(place.pages))


def run(runner: Runner, requests: Sequence[Request], chunks: Sequence[int]) -> list[Tensor]:
    """Logits of each request; all take the same chunks together."""
    pieces: list[list[Tensor]] = [[] for _ in requests]
    for count in chunks:
        for result in runner.execute([ScheduledRequest(r, count) for r in requests]):
            pieces[requests.index(result.request)].append(result.logits)
    return [torch.cat(p) for p in pieces]


def stored(runner: Runner, request: Request) -> dict[str, Tensor]:
    """All that is stored of a request, in logical order."""
    cache, text, count = runner.cache, runner.config.text_config, request.num_computed_tokens
    slots = torch.arange(count - text.sliding_window, count) % cache.ring_size
    found = {f"window {layer}": pool[request.ring, slots] for layer, pool in enumerate(cache.window)}
    for layer, pool in cache.main.items():
        entries, per_page = torch.arange(count // text.layers[layer].compress_ratio), pool.shape[1]
        places = torch.tensor(request.pages)[entries // per_page], entries % per_page
        found |= {f"main {layer}": pool[places], f"index keys {layer}": cache.index_keys[layer][places]}
    for layer, pool in cache.pending.items():
        if count % 2:
            found[f"pending {layer}"] = pool[request.ring, count // 2 % cache.pair_slots]
    return {name: value.clone() for name, value in found.items()}


FIRST, SECOND = Place(0, tuple(range(12))), Place(1, tuple(range(20, 32)))
OTHER, ANOTHER = Place(3, tuple(range(63, 51, -1))), Place(0, (5, 50, 2, 49, 8, 47, 11, 44, 14, 40, 17, 36))
CHUNKS = ([LENGTH], [30, 7, 1, 22, 30], [30, 7, 1, 22, 29])


@pytest.mark.parametrize("chunks", CHUNKS, ids=["whole", "even", "odd"])
@pytest.mark.parametrize(("quantization", "layout"), [("none", ()), ("released", ()), ("released", PACKED)], ids=str)
def test_bits_do_not_depend_on_pages_rings_and_stale_memory(
    quantization: str, layout: tuple[tuple[str, str], ...], chunks: list[int]
) -> None:
    runner = runner_of("tiny-a", quantization, cache=layout)
    poison(runner)
    ours, theirs = request(0, 0, FIRST), request(1, 1, SECOND)
    logits = run(runner, [ours, theirs], chunks)
    bits = [stored(runner, ours), stored(runner, theirs)]
    run(runner, [request(2, 2, OTHER)], [LENGTH])  # leaves its numbers where the next ones go
    ours, theirs = request(0, 0, OTHER), request(1, 1, ANOTHER)
    again = run(runner, [ours, theirs], chunks)
    for one, other in zip(bits, [stored(runner, ours), stored(runner, theirs)], strict=True):
        assert set(one) == set(other)
        for name in one:
            assert not one[name].is_floating_point() or torch.isfinite(one[name]).all(), name
            assert torch.equal(one[name], other[name]), name
    assert torch.equal(logits[0], again[0])
    assert torch.equal(logits[1], again[1])


@pytest.mark.parametrize(("quantization", "layout"), [("none", ()), ("released", PACKED)], ids=str)
def test_what_others_hold_is_left_alone(quantization: str, layout: tuple[tuple[str, str], ...]) -> None:
    """Nothing outside a request's ring and pages is written."""
    runner = runner_of("tiny-a", quantization, cache=layout)
    poison(runner)
    run(runner, [request(0, 0, OTHER)], [50, 39])
    cache = runner.cache
    for pool in (*cache.window, *cache.pending.values()):
        others = torch.arange(len(pool)) != OTHER.ring
        assert untouched(pool[others])
        assert not untouched(pool[~others])
    for pool in (*cache.main.values(), *cache.index_keys.values()):
        others = ~torch.isin(torch.arange(len(pool)), torch.tensor(OTHER.pages))
        assert untouched(pool[others])
    assert cache.num_bytes == sum(pool.nbytes for pool in pools(runner))


def test_other_chunks_flip_few_stored_codes() -> None:
    """Reported for logits, bounded for codes: noise of 1e-6 flips far fewer than 1 %."""
    runner = runner_of("tiny-a", "released")
    found = []
    for chunks in CHUNKS[:2]:
        poison(runner)
        ours = request(0, 0, FIRST)
        found.append((run(runner, [ours], chunks)[0], stored(runner, ours)))
    (logits, bits), (other_logits, other_bits) = found
    flipped = sum(int((bits[name] != other_bits[name]).sum()) for name in bits)
    total = sum(value.numel() for value in bits.values())
    error = (logits - other_logits).norm(dim=1) / logits.norm(dim=1)
    print(f"{flipped} of {total} stored values differ; logits of a row differ by at most {float(error.max()):.1e}")
    assert flipped < 0.01 * total
    assert torch.isfinite(error).all()


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "bf16"), ("bfloat16", "float32"), ("float32", "float32")])
def test_this_steps_window_entries_are_as_the_ring_holds_them(dtype: str, layout: str) -> None:
    """Else a row would read other numbers in a chunk than across two."""
    pages = (("layout", layout), ("page_tokens", 8), ("num_pages", 64), ("max_requests", 4))
    runner = runner_of("tiny-a", dtype=dtype, cache=pages)
    poison(runner)
    seen: list[Tensor] = []
    attention = runner.model.blocks[2].attention
    operator = attention.attention[Phase.PREFILL]

    class Watching:
        def prepare(self, batch: object) -> object:
            return operator.prepare(batch)  # type: ignore[arg-type]

        def run(self, **arguments: object) -> Tensor:
            seen.append(arguments["window_new"])  # type: ignore[arg-type]
            return operator.run(**arguments)  # type: ignore[arg-type]

    attention.attention = {**attention.attention, Phase.PREFILL: Watching()}
    try:
        run(runner, [request(0, 0, FIRST)], [20])
    finally:
        attention.attention = {**attention.attention, Phase.PREFILL: operator}
    assert torch.equal(seen[0], runner.cache.window[2][0, :20].to(seen[0].dtype))


def test_pairs_are_pooled_channel_by_channel_across_chunks() -> None:
    """Ratio 2 (spec 3.5) against a loop, for every cut of five tokens into two chunks."""
    pair = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    expected = []
    for j in range(2):
        (k0, s0), (k1, s1) = pair[2 * j].double(), pair[2 * j + 1].double()
        a0, a1 = s0.exp() / (s0.exp() + s1.exp()), s1.exp() / (s0.exp() + s1.exp())
        expected.append(a0 * k0 + a1 * k1)
    for cut in range(6):
        pending, found = torch.full((4, 2, 2, 3), torch.nan), []
        for context, length in ((0, cut), (cut, 5 - cut)):
            table = torch.zeros(1, 1, dtype=torch.int32)
            rows = Rows.pack([length], [context], [Phase.PREFILL], [0], torch.tensor([2]), table, 8)
            found.append(Compressor._pool(pair[context : context + length], rows.entries(2, 2), pending))
        torch.testing.assert_close(torch.cat(found).double(), torch.stack(expected), rtol=1e-6, atol=1e-6)
        assert torch.equal(pending[2], pair[[4, 2]])  # the unpaired last token, and the first half before it
        assert pending[[0, 1, 3]].isnan().all()


def test_pages_are_taken_once_and_given_back_once() -> None:
    pages = PageAllocator(4, 16)
    assert [pages.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    taken = pages.take(3)
    assert len(set(taken)) == 3
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        pages.take(2)
    pages.give_back(taken)
    assert pages.num_free == 4
    with pytest.raises(AssertionError, match="given back but nobody holds it"):
        pages.give_back(taken[:1])
