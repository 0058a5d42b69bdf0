"""The command `mini-deepinfer bench prefill`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minideepinfer.cli.options import add_engine_options, engine_config
from minideepinfer.errors import ConfigError

if TYPE_CHECKING:
    from minideepinfer.config import EngineConfig, ModelConfig
    from minideepinfer.measure.steps import Profile

CONFIGS = {"v41-rank": "config.full.json", "tiny": "config.tiny.json"}
"""The packaged model that a preset measures."""


def add_prefill(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser("prefill", help="one rank of an expert-parallel world, at the end of a long context")
    parser.add_argument("--preset", choices=CONFIGS, default="v41-rank")
    parser.add_argument("--replay", choices=("full", "bounded"), help="rows that run the decoder layers")
    add_step_options(parser)
    parser.set_defaults(run=_run)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all benchmarks of steps share."""
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers, for a quick look")
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps")
    parser.add_argument(
        "--profile",
        nargs="+",
        action="append",
        default=[],
        metavar="WHAT",
        help="`stages`: a table of stages; `trace FILE`: one step as a Chrome / Perfetto trace; may be repeated",
    )
    parser.add_argument("--output", metavar="FILE", help="write the record there, as JSON")
    add_engine_options(parser)


def profile_of(args: argparse.Namespace) -> Profile:
    """What `--profile` asks for.

    Raises:
        ConfigError: it asks for something else.
    """
    from minideepinfer.measure.steps import Profile

    stages, trace = False, None
    for words in args.profile:
        match words:
            case ["stages"]:
                stages = True
            case ["trace", file]:
                trace = Path(file)
            case _:
                raise ConfigError(f"--profile {' '.join(words)}: known are `stages` and `trace FILE`")
    for name, path in (("--profile trace", trace), ("--output", args.output)):
        if path:  # what cannot be written is better known before minutes of measuring
            try:
                Path(path).open("a").close()
            except OSError as error:
                raise ConfigError(f"{name} {path}: cannot be written ({error.strerror or error})") from None
    return Profile(stages, trace)


def model_of(preset: str, engine: EngineConfig) -> ModelConfig:
    """The packaged model of a preset.

    Raises:
        ConfigError: the machine is no place for it.
    """
    from importlib import resources

    from minideepinfer.config import ModelConfig
    from minideepinfer.runtime.problems import resolve_device

    if preset == "v41-rank" and (device := resolve_device(engine)).type != "cuda":
        raise ConfigError(
            f"bench: preset v41-rank fills about 96 GiB of a GPU and the device is {device}; "
            "--preset tiny runs on a CPU"
        )
    return ModelConfig.from_file(Path(str(resources.files("minideepinfer") / "data" / CONFIGS[preset])))


def say(what: str) -> None:
    """Tell what comes next, beside the report."""
    print(what, file=sys.stderr, flush=True)


def _run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from minideepinfer.measure.prefill import PRESETS, PrefillBench, headline, measure_prefill
    from minideepinfer.measure.record import write_records
    from minideepinfer.measure.step_report import prefill_lines

    if args.replay:
        args.settings.append(("replay", args.replay))
    engine = engine_config(args)
    config = model_of(args.preset, engine)
    problem = replace(PRESETS[args.preset], num_layers=args.layers)
    if args.steps is not None:
        problem = replace(problem, steps=args.steps)
    profile = profile_of(args)
    bench = PrefillBench(config, engine, problem)
    print("\n".join([headline(bench), *bench.rank.setup.plan.lines()]), flush=True)
    record = measure_prefill(config, engine, problem, profile=profile, bench=bench, progress=say)
    print("\n".join(prefill_lines(record)))
    if args.output:
        write_records(args.output, [record])
    return 0
