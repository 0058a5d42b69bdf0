"""What the benchmarks of steps, `bench prefill` and `bench decode`, share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minideepinfer.cli.options import add_engine_options, engine_config
from minideepinfer.errors import ConfigError

if TYPE_CHECKING:
    from minideepinfer.config import EngineConfig, ModelConfig
    from minideepinfer.measure.steps import Profile
    from minideepinfer.runtime.world import World

OWN_SETTINGS = ("cache.num_pages", "cache.max_requests")
"""What a benchmark decides by its problem."""

CONFIGS = {"v41-rank": "config.full.json", "tiny": "config.tiny.json"}
"""The packaged model that a preset measures."""


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--preset", choices=CONFIGS, default="v41-rank")
    parser.add_argument("--model", metavar="DIR", help="a checkpoint whose weights are used, or tiny; random ones else")
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
    for path in (trace, args.output):
        if path:
            require_writable(path)
    return Profile(stages, trace)


@contextmanager
def ranks_of(args: argparse.Namespace) -> Iterator[tuple[EngineConfig, World]]:
    """The engine's configuration and its ranks: those that torchrun started, or this process alone.

    Raises:
        ConfigError: a setting that the benchmark decides is given, or the device is too small.
        RankError: another rank did not come, failed or died.
    """
    import torch

    from minideepinfer.runtime.world import join

    for key, _ in args.settings:
        if key in OWN_SETTINGS:
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
