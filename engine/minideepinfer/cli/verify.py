"""The command `mini-deepinfer verify`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minideepinfer.cli.options import add_engine_options, engine_config


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("verify", help="compare the engine and its operators with a golden set")
    parser.add_argument("path", help="a directory with a checkpoint, manifest.json and golden outputs")
    parser.add_argument(
        "--variant",
        metavar="RUN,...",
        type=_names,
        help="runs to repeat, e.g. fp32-noq,bf16-q (default: all there are)",
    )
    parser.add_argument("--sequence", metavar="NAME,...", type=_names, help="sequences to run (default: all there are)")
    add_engine_options(parser)
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from minideepinfer.testing.golden import verify

    config = engine_config(args)
    console = Console(stderr=True)
    with console.status("reading the set") as status:
        report = verify(
            args.path, variants=args.variant, sequences=args.sequence, config=config, progress=status.update
        )
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        report.print(Console())
    return 0 if report.ok else 1


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names
