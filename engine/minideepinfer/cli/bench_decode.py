"""The command `mini-deepinfer bench decode`."""

from __future__ import annotations

import argparse
from typing import Any

from minideepinfer.cli.bench_steps import add_step_options, model_of, profile_of, ranks_of, say, silent


def add_decode(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser("decode", help="the same rank, one new token for each of its requests")
    parser.add_argument("--batch", type=_numbers, metavar="N,...", help="batch sizes, requests of this rank")
    parser.add_argument("--context", type=_numbers, metavar="N,...", help="tokens before the new one")
    add_step_options(parser)
    parser.set_defaults(run=_run)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,8") from None


def _run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from minideepinfer.measure.decode import PRESETS, DecodeBench, headline, measure_decode
    from minideepinfer.measure.record import Record, write_records
    from minideepinfer.measure.step_report import decode_lines

    profile = profile_of(args)
    with ranks_of(args) as (engine, world):
        given = {"batch_sizes": args.batch, "contexts": args.context, "num_layers": args.layers, "steps": args.steps}
        given |= {"checkpoint": args.model, "world_size": world.size if world.size > 1 else None}
        problem = replace(PRESETS[args.preset], **{name: value for name, value in given.items() if value is not None})
        config = model_of(args.preset, engine, args.model)
        first = world.rank == 0
        bench = DecodeBench(config, engine, problem, world)
        if first:
            print("\n".join([headline(bench), *bench.rank.setup.plan.lines()]), flush=True)
        records: list[Record] = []
        measured = measure_decode(
            config, engine, problem, profile=profile, bench=bench, progress=say if first else silent
        )
        for record in measured:
            records.append(record)
            if first:
                print("\n".join(decode_lines(record)), flush=True)
                if args.output:
                    write_records(args.output, records)
    return 0
