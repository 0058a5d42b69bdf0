"""The command `mini-deepinfer bench prefill`."""

from __future__ import annotations

import argparse
from typing import Any

from minideepinfer.cli.bench_steps import add_step_options, model_of, profile_of, ranks_of, say, silent


def add_prefill(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser("prefill", help="one rank of an expert-parallel world, at the end of a long context")
    parser.add_argument("--replay", choices=("full", "bounded"), help="rows that run the decoder layers")
    add_step_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from minideepinfer.measure.prefill import PRESETS, PrefillBench, headline, measure_prefill
    from minideepinfer.measure.record import write_records
    from minideepinfer.measure.step_report import prefill_lines

    if args.replay:
        args.settings.append(("replay", args.replay))
    profile = profile_of(args)
    with ranks_of(args) as (engine, world):
        given = {"num_layers": args.layers, "steps": args.steps, "checkpoint": args.model}
        given["world_size"] = world.size if world.size > 1 else None
        problem = replace(PRESETS[args.preset], **{name: value for name, value in given.items() if value is not None})
        config = model_of(args.preset, engine, args.model)
        first = world.rank == 0
        bench = PrefillBench(config, engine, problem, world)
        if first:
            print("\n".join([headline(bench), *bench.rank.setup.plan.lines()]), flush=True)
        record = measure_prefill(
            config, engine, problem, profile=profile, bench=bench, progress=say if first else silent
        )
        if first:
            print("\n".join(prefill_lines(record)))
            if args.output:
                write_records(args.output, [record])
    return 0
