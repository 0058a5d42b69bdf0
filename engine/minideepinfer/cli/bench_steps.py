"""What the benchmarks of a rank, `bench prefill`, `bench decode` and `bench prefix`, share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minideepinfer.cli.options import add_engine_options, engine_config
from minideepinfer.errors import ConfigError

if TYPE_CHECKING:
    from minideepinfer.config import EngineConfig, ModelConfig
    from minideepinfer.measure.record import Record
    from minideepinfer.measure.steps import Profile
    from minideepinfer.runtime.world import World

REPLAYS = ("full", "halo", "bounded")
"""What `replay` may be; `full` comes first, since others are compared with it."""
OWN_SETTINGS = ("cache.num_pages", "cache.max_requests")
"""What a benchmark decides by its problem."""

CONFIGS = {"v41-rank": "config.full.json", "tiny": "config.tiny.json"}
"""The packaged model that a preset measures."""


Progress = Callable[[str], None]


@dataclass(frozen=True)
class StepBenchmark:
    """One of the benchmarks.

    Attributes:
        presets: its problems by name.
        bench: from model, engine, problem and world, makes a rank that is ready to be measured.
        measure: from that and what is told what comes next, the records.
        lines: a record, for people.
        own: further settings that the problem decides.
    """

    presets: Mapping[str, Any]
    bench: Callable[[ModelConfig, EngineConfig, Any, World], Any]
    measure: Callable[[Any, Progress], Iterable[Record]]
    lines: Callable[[Record], list[str]]
    own: Sequence[str] = ()


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every benchmark of a rank."""
    parser.add_argument("--preset", choices=CONFIGS, default="v41-rank")
    parser.add_argument("--model", metavar="DIR", help="a checkpoint whose weights are used, or tiny; random ones else")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers, for a quick look")
    parser.add_argument("--output", metavar="FILE", help="write the record there, as JSON")
    add_engine_options(parser)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a benchmark that repeats one step."""
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps")
    parser.add_argument(
        "--profile",
        nargs="+",
        action="append",
        default=[],
        metavar="WHAT",
        help="`stages`: a table of stages; `trace FILE`: one step as a Chrome / Perfetto trace; may be repeated",
    )


def run_benchmark(args: argparse.Namespace, benchmark: StepBenchmark, **given: Any) -> int:
    """Measure, print, and keep record by record, so that an interrupted run keeps what it has.

    Args:
        args: those of `add_rank_options`.
        benchmark: what to measure.
        given: parts of the preset's problem to change; None = as the preset has it.
    """
    from minideepinfer.measure.record import require_writable, write_records

    if args.output:
        require_writable(args.output)
    with ranks_of(args, benchmark.own) as (engine, world):
        given |= {"num_layers": args.layers, "checkpoint": args.model}
        given["world_size"] = world.size if world.size > 1 else None
        changes = {name: value for name, value in given.items() if value is not None}
        problem = replace(benchmark.presets[args.preset], **changes)
        config = model_of(args.preset, engine, args.model)
        first = world.rank == 0
        bench = benchmark.bench(config, engine, problem, world)
        if first:
            print("\n".join([bench.headline, *bench.rank.setup.plan.lines()]), flush=True)
        records: list[Record] = []
        for record in benchmark.measure(bench, say if first else silent):
            records.append(record)
            if first:
                print("\n".join(benchmark.lines(record)), flush=True)
                if args.output:
                    write_records(args.output, records)
    return 0


def profile_of(args: argparse.Namespace) -> Profile:
    """What `--profile` asks for.

    Raises:
        ConfigError: it asks for something else, or what is asked for cannot be written.
    """
    from minideepinfer.measure.record import require_writable
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
    if trace and args.output and trace.resolve() == Path(args.output).resolve():
        raise ConfigError(f"--profile trace {trace} and --output {args.output} are one file, need one each")
    if trace:
        require_writable(trace)
    return Profile(stages, trace)


@contextmanager
def ranks_of(args: argparse.Namespace, own: Sequence[str] = ()) -> Iterator[tuple[EngineConfig, World]]:
    """The engine's configuration and its ranks: those that torchrun started, or this process alone.

    Args:
        args: the command's.
        own: settings that the benchmark decides, beside `OWN_SETTINGS`.

    Raises:
        ConfigError: a setting that the benchmark decides is given, or the device is too small.
        RankError: another rank did not come, failed or died.
    """
    import torch

    from minideepinfer.runtime.world import join

    for key, _ in args.settings:
        if key in (*OWN_SETTINGS, *own):
            raise ConfigError(f"--set {key}: the benchmark's problem decides it, and nothing would change")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        args.settings.append(("parallel.expert", size))
    engine = engine_config(args)
    if size > 1 and engine.device == "auto":
        engine = engine.model_copy(update={"device": _own_device()})
    world = join(engine.parallel)
    try:
        with world.together():
            yield engine, world
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"bench: no room on the device; fewer layers or requests need less ({reason})") from error
    world.close()


def _own_device() -> str:
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def model_of(preset: str, engine: EngineConfig, checkpoint: str | None = None) -> ModelConfig:
    """The checkpoint's model, or the packaged one of the preset.

    Raises:
        ConfigError: the machine is no place for it.
        CheckpointError: the checkpoint is damaged.
    """
    from importlib import resources

    from minideepinfer.config import ModelConfig
    from minideepinfer.measure.rank_weights import checkpoint_config
    from minideepinfer.runtime.problems import resolve_device

    if checkpoint is not None:
        return checkpoint_config(checkpoint)
    if preset == "v41-rank" and (device := resolve_device(engine)).type != "cuda":
        raise ConfigError(
            f"bench: preset v41-rank fills about 96 GiB of a GPU and the device is {device}; "
            "--preset tiny runs on a CPU"
        )
    return ModelConfig.from_file(Path(str(resources.files("minideepinfer") / "data" / CONFIGS[preset])))


def say(what: str) -> None:
    """Tell what comes next, beside the report."""
    print(what, file=sys.stderr, flush=True)


def silent(what: str) -> None:
    """Tell nothing: another rank does."""
