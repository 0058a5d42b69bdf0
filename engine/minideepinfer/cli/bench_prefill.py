"""The command `mini-deepinfer bench prefill`."""

from __future__ import annotations

import argparse
from typing import Any

from minideepinfer.cli.bench_steps import (
    REPLAYS,
    StepBenchmark,
    add_rank_options,
    add_step_options,
    profile_of,
    run_benchmark,
)


def add_prefill(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser("prefill", help="one rank of an expert-parallel world, at the end of a long context")
    parser.add_argument("--replay", choices=REPLAYS, help="rows that run the decoder layers")
    add_step_options(parser)
    add_rank_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from minideepinfer.measure.prefill import PRESETS, PrefillBench, measure_prefill
    from minideepinfer.measure.step_report import prefill_lines

    if args.replay:
        args.settings.append(("replay", args.replay))
    profile = profile_of(args)
    benchmark = StepBenchmark(
        PRESETS,
        PrefillBench,
        lambda bench, progress: [measure_prefill(bench, profile=profile, progress=progress)],
        prefill_lines,
    )
    return run_benchmark(args, benchmark, steps=args.steps)
