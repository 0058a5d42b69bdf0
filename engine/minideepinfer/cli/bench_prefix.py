"""The command `mini-deepinfer bench prefix`."""

from __future__ import annotations

import argparse
from typing import Any

from minideepinfer.cli.bench_steps import REPLAYS, StepBenchmark, add_rank_options, run_benchmark


def add_prefix(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser("prefix", help="the same prompt cold and behind a prefix hit, through the whole engine")
    parser.add_argument(
        "--replay", type=_replays, metavar="HOW,...", help=f"one after the other, of {', '.join(REPLAYS)}; full,bounded"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="measured runs behind a hit")
    add_rank_options(parser)
    parser.set_defaults(run=_run)


def _replays(text: str) -> tuple[str, ...]:
    replays = text.split(",")
    if unknown := [name for name in replays if name not in REPLAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(REPLAYS)}")
    return tuple(sorted(replays, key=REPLAYS.index))  # what is compared with `full` comes behind it


def _run(args: argparse.Namespace) -> int:
    from minideepinfer.measure.prefix import OWN_SETTINGS, PRESETS, PrefixBench, measure_prefix
    from minideepinfer.measure.step_report import prefix_lines

    benchmark = StepBenchmark(
        PRESETS,
        PrefixBench,
        lambda bench, progress: measure_prefix(bench, progress=progress),
        prefix_lines,
        own=OWN_SETTINGS,
    )
    return run_benchmark(args, benchmark, replays=args.replay, repeats=args.repeats)
