"""The command `mini-deepinfer config`."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    subparsers.add_parser("config", help="not built yet").set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    raise NotImplementedError
