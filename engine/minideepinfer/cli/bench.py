"""The command `mini-deepinfer bench`."""

from __future__ import annotations

from typing import Any

from minideepinfer.cli.bench_compare import add_compare
from minideepinfer.cli.bench_decode import add_decode
from minideepinfer.cli.bench_kernel import add_kernel
from minideepinfer.cli.bench_ladder import add_ladder, add_report
from minideepinfer.cli.bench_prefill import add_prefill
from minideepinfer.cli.bench_prefix import add_prefix


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("bench", help="measure operators and the steps of one rank, and compare")
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    for add in (add_kernel, add_prefill, add_decode, add_prefix, add_ladder, add_report, add_compare):
        add(actions)
