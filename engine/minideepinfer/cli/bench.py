"""The command `mini-deepinfer bench`."""

from __future__ import annotations

from typing import Any

from minideepinfer.cli import bench_ladder, bench_prefill


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("bench", help="measure: one rank's prefill, and the ladder of plans")
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    bench_prefill.add_parser(actions)
    bench_ladder.add_parsers(actions)
