"""What the caches take while requests run, measured, against the formula that `checkpoint size` prints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_fixtures import PACKED_NAN, poison, pools, runner_of, text_tokens
from golden_sets import GOLDEN
from minideepinfer.checkpoint.size import cache_sizes
from minideepinfer.cli.main import main
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.runner import Runner
from torch import Tensor

LAYOUTS = [("float32", "none"), ("bf16", "none"), ("released", "released")]
CLOSE = 0.03


def tensors(thing: Any, seen: set[int]) -> list[Tensor]:
    """Every tensor that an object holds, however deep."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif type(thing).__module__.startswith("minideepinfer.cache"):
        parts = list(vars(thing).values())
    return [tensor for part in parts for tensor in tensors(part, seen)]


def held_bytes(runner: Runner) -> int:
    """Bytes of all memory behind the caches, whoever made it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(runner.cache, set())}
    return sum(storages.values())


def loaded(name: str, layout: str, quantization: str, num_pages: int, max_requests: int) -> Runner:
    page_tokens = {"tiny-a": 8, "tiny-b": 16}[name]
    cache = (
        ("layout", layout),
        ("page_tokens", page_tokens),
        ("num_pages", num_pages),
        ("max_requests", max_requests),
        ("prefix", True),
    )
    return runner_of(name, quantization, cache=cache, max_tokens_per_step=64)


def peaks(engine: Engine, lengths: list[int], name: str) -> tuple[int, int, int]:
    """Run requests of these lengths, the last 12 tokens of each in decode steps.

    Returns:
        The most bytes that the caches took, the most pages and the most rings that were held in a step.
    """
    for number, length in enumerate(lengths):
        ids = text_tokens(name, 1 + number, length)
        engine.scheduler.add(engine.make_request(ids, length, length - 12, "last"))
    most = [0, 0, 0]
    while engine.busy:
        engine.step()
        pages, rings = engine.scheduler.pages, engine.scheduler
        now = held_bytes(engine.runner), pages.num_pages - pages.num_free, len(rings.running)
        most = [max(pair) for pair in zip(most, now, strict=True)]
    return most[0], most[1], most[2]


@pytest.mark.parametrize(("layout", "quantization"), LAYOUTS)
@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
def test_a_cache_for_n_tokens_takes_what_the_formula_says(name: str, layout: str, quantization: str) -> None:
    """N tokens of three requests, a pool of just the pages that these need: nothing is made beside the pools."""
    lengths = [400, 333, 267]
    page_tokens = {"tiny-a": 8, "tiny-b": 16}[name]
    num_pages = sum(-(-length // page_tokens) for length in lengths)
    runner = loaded(name, layout, quantization, num_pages, len(lengths))
    size = cache_sizes(runner.config.text_config)[layout]
    formula = float(size.bytes_per_token * sum(lengths) + size.bytes_per_request * len(lengths))
    taken, pages, rings = peaks(Engine(runner), lengths, name)
    print(f"{name}, {layout}: {taken} bytes taken, {formula:.0f} by the formula ({taken / formula - 1:+.2%})")
    assert abs(taken / formula - 1) <= CLOSE
    assert taken == runner.cache.num_bytes
    assert pages == num_pages
    assert rings <= len(lengths)


@pytest.mark.parametrize(("layout", "quantization"), LAYOUTS)
def test_what_a_run_writes_is_what_the_formula_says(layout: str, quantization: str) -> None:
    """Counted number by number in memory that was NaN before: of a large pool, a run writes its own share."""
    length = 302
    runner = loaded("tiny-a", layout, quantization, 64, 4)
    poison(runner)
    size = cache_sizes(runner.config.text_config)[layout]
    formula = float(size.bytes_per_token * length + size.bytes_per_request)
    engine = Engine(runner)
    _, pages, rings = peaks(engine, [length], "tiny-a")
    blank = [pool.isnan() if pool.is_floating_point() else pool == PACKED_NAN for pool in pools(runner)]
    written = sum(int((~nothing).sum()) * p.element_size() for p, nothing in zip(pools(runner), blank, strict=True))
    if layout == "released":  # a byte may be 255 by chance
        assert 0.97 * formula <= written <= formula
    else:
        assert written == formula
    held = pages * runner.cache.page_bytes + rings * runner.cache.ring_bytes
    assert abs(held / formula - 1) <= CLOSE, "page padding included"


def test_the_command_prints_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "size", str(GOLDEN / "tiny-a"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["caches"]
    formula = cache_sizes(runner_of("tiny-a").config.text_config)
    assert printed == {
        name: {
            "bytes_per_token": float(size.bytes_per_token),
            "bytes_per_page": size.bytes_per_page,
            "bytes_per_request": size.bytes_per_request,
        }
        for name, size in formula.items()
    }
