"""The command `mini-deepinfer checkpoint`."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minideepinfer.checkpoint import Summary, Total

_UNITS = ("B", "kB", "MB", "GB", "TB")


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("checkpoint", help="size, inspect or make a checkpoint; nothing is loaded")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    size = actions.add_parser("size", help="tensors and bytes per kind and per rank, and what the caches take")
    size.add_argument("path", help="a checkpoint directory, tiny, or a config.json alone")
    size.add_argument("--ranks", type=_positive, default=1, help="ranks that share experts and Engram tables")
    size.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="compute dtype in memory")
    size.add_argument("--json", action="store_true", help="print data instead of tables")
    size.set_defaults(run=_size)

    inspect = actions.add_parser("inspect", help="verify every name, shape and dtype without reading tensor data")
    inspect.add_argument("path", help="a checkpoint directory, or tiny")
    inspect.add_argument("--json", action="store_true", help="print data instead of a table")
    inspect.set_defaults(run=_inspect)

    make = actions.add_parser("make-tiny", help="write a random checkpoint in the released layout")
    make.add_argument("path", type=Path, help="a new or empty directory")
    make.add_argument("--config", type=Path, default=None, help="a config.json (default: a tiny one of 12 layers)")
    make.add_argument("--seed", type=_natural, default=0, help="the same seed gives the same bytes (default: 0)")
    make.set_defaults(run=_make_tiny)


def _size(args: argparse.Namespace) -> int:
    from minideepinfer.checkpoint import verify
    from minideepinfer.checkpoint.shards import INDEX_NAME
    from minideepinfer.checkpoint.size import PAGE_TOKENS, cache_sizes, layout_summary, memory_summaries, rank_summaries
    from minideepinfer.checkpoint.verify import directory_of
    from minideepinfer.config import ModelConfig

    path = directory_of(args.path)
    config = ModelConfig.from_file(path)
    has_shards = (path / INDEX_NAME).exists()
    whole = verify(path).summary if has_shards else layout_summary(config)
    ranks, memory = rank_summaries(config, args.ranks), memory_summaries(config, args.ranks, args.dtype)
    caches = cache_sizes(config.text_config)
    if args.json:
        data = {
            "path": args.path,
            "source": "shards" if has_shards else "config",
            **_as_data(whole),
            "ranks": [_as_data(r) | {"memory_bytes": m.total.bytes} for r, m in zip(ranks, memory, strict=True)],
            "caches": {
                name: {
                    "bytes_per_token": float(cache.bytes_per_token),
                    "bytes_per_page": cache.bytes_per_page,
                    "bytes_per_request": cache.bytes_per_request,
                }
                for name, cache in caches.items()
            },
        }
        print(json.dumps(data, indent=1))
        return 0
    largest = max(ranks, key=lambda rank: rank.total.bytes)
    _print_kinds(whole, largest, "this rank" if args.ranks == 1 else f"largest of {args.ranks} ranks")
    print(f"Weights in memory, {args.dtype}: {_human(max(rank.total.bytes for rank in memory))} on that rank.")
    if not has_shards:
        print("From the config alone: vision tensors are not counted.")
    for name, cache in caches.items():
        print(
            f"Caches in {name}: {float(cache.bytes_per_token):,g} B per token, in pages of {PAGE_TOKENS} tokens "
            f"({cache.bytes_per_page:,} B, a request's last page whole), and {_human(cache.bytes_per_request)} of "
            "window rings per request."
        )
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from minideepinfer.checkpoint import verify

    start = time.perf_counter()
    inventory = verify(args.path)
    seconds = time.perf_counter() - start
    num_shards = len({tensor.file for tensor in inventory.tensors.values()})
    summary = inventory.summary
    if args.json:
        data = {"path": args.path, "shards": num_shards, "seconds": round(seconds, 3), **_as_data(summary)}
        print(json.dumps(data, indent=1))
        return 0
    _print_kinds(summary)
    print(
        f"{args.path}: {summary.total.tensors:,} tensors in {num_shards} shards have the names, shapes and dtypes that "
        f"config.json asks for; checked in {seconds:.2f} s, no tensor data read. Draft and vision, not run here: "
        f"{summary.skipped.tensors:,} tensors, {summary.skipped.bytes:,} bytes."
    )
    return 0


def _make_tiny(args: argparse.Namespace) -> int:
    from minideepinfer.checkpoint.make_tiny import DEFAULT_CONFIG, make_tiny

    written = make_tiny(args.path, args.config or DEFAULT_CONFIG, args.seed)
    print(f"{args.path}: wrote {written:,} bytes of tensors (seed {args.seed}, no tokenizer)")
    return 0


def _as_data(summary: Summary) -> dict[str, Any]:
    return {
        "tensors": summary.total.tensors,
        "bytes": summary.total.bytes,
        "kinds": {kind: asdict(total) for kind, total in summary.kinds.items()},
        "skipped": asdict(summary.skipped),
    }


def _print_kinds(whole: Summary, rank: Summary | None = None, rank_title: str = "") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kind")
    for title in ("tensors", "bytes", "", *([rank_title] if rank else [])):
        table.add_column(title, justify="right")
    for kind, total in whole.kinds.items():
        table.add_row(kind, *_cells(total), *([_rank_cell(rank.kinds.get(kind))] if rank else []))
    table.add_section()
    table.add_row("total", *_cells(whole.total), *([_human(rank.total.bytes)] if rank else []))
    Console().print(table)


def _cells(total: Total) -> tuple[str, str, str]:
    return f"{total.tensors:,}", f"{total.bytes:,}", _human(total.bytes)


def _rank_cell(total: Total | None) -> str:
    return _human(total.bytes) if total else "not read"


def _human(count: float) -> str:
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.4g} {unit}"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value
