"""The command `mini-deepinfer bench decode`."""

from __future__ import annotations

import argparse
from typing import Any

from minideepinfer.cli.bench_steps import StepBenchmark, add_rank_options, add_step_options, profile_of, run_benchmark


def add_decode(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser("decode", help="the same rank, one new token for each of its requests")
    parser.add_argument("--batch", type=_numbers, metavar="N,...", help="batch sizes, requests of this rank")
    parser.add_argument("--context", type=_numbers, metavar="N,...", help="tokens before the new one")
    add_step_options(parser)
    add_rank_options(parser)
    parser.set_defaults(run=_run)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,8") from None


def _run(args: argparse.Namespace) -> int:
    from minideepinfer.measure.decode import PRESETS, DecodeBench, measure_decode
    from minideepinfer.measure.step_report import decode_lines

    profile = profile_of(args)
    benchmark = StepBenchmark(
        PRESETS,
        DecodeBench,
        lambda bench, progress: measure_decode(bench, profile=profile, progress=progress),
        decode_lines,
    )
    return run_benchmark(args, benchmark, steps=args.steps, batch_sizes=args.batch, contexts=args.context)
