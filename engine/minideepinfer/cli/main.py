"""The command `mini-deepinfer`."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from minideepinfer.errors import MiniDeepInferError

COMMANDS = ("generate", "bench", "ops", "checkpoint", "config", "verify")
"""Modules of `minideepinfer.cli`; each has `add_parser(subparsers)`, which sets `run=function(args) -> exit code`."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; importing them imports nothing heavy."""
    parser = argparse.ArgumentParser(prog="mini-deepinfer", description="A plugin-based engine for DeepSeek-V4.1.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"minideepinfer.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done, 1 failed (message on stderr, none if nobody reads stdout any more), 2 wrong usage, 130 interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to stop
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except MiniDeepInferError as error:
        from minideepinfer.runtime.launch import report

        if not report(error):
            print(f"mini-deepinfer: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter flushes into it at exit
        return 1
    except KeyboardInterrupt:
        from minideepinfer.runtime.launch import report

        if not report(MiniDeepInferError("KeyboardInterrupt")):
            print("mini-deepinfer: interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message
        return int(stop.code or 0)
    args.arguments = list(sys.argv[1:] if argv is None else argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
