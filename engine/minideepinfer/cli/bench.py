"""The command `mini-deepinfer bench`."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from minideepinfer.cli.bench_compare import add_compare
from minideepinfer.cli.bench_kernel import add_kernel
from minideepinfer.cli.options import add_engine_options, engine_config
from minideepinfer.errors import ConfigError

if TYPE_CHECKING:
    from minideepinfer.measure.prefill import PrefillBench, PrefillResult


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("bench", help="measure operators and the fixed prefill benchmark, and compare")
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    prefill = actions.add_parser("prefill", help="one rank of an expert-parallel world, at the end of a long context")
    prefill.add_argument("--preset", choices=("v41-rank", "tiny"), default="v41-rank")
    prefill.add_argument("--replay", choices=("full", "bounded"), help="rows that run the decoder layers")
    prefill.add_argument("--layers", type=int, metavar="N", help="only the first N layers, for a quick look")
    prefill.add_argument("--steps", type=int, metavar="N", help="measured steps")
    prefill.add_argument("--output", metavar="FILE", help="write the record there, as JSON")
    add_engine_options(prefill)
    prefill.set_defaults(run=_prefill)
    add_kernel(actions)
    add_compare(actions)


def _prefill(args: argparse.Namespace) -> int:
    from dataclasses import replace
    from importlib import resources

    from minideepinfer.config import ModelConfig
    from minideepinfer.measure.prefill import PRESETS, PrefillBench
    from minideepinfer.runtime.problems import resolve_device

    if args.replay:
        args.settings.append(("replay", args.replay))
    engine = engine_config(args)
    if args.preset == "v41-rank" and (device := resolve_device(engine)).type != "cuda":
        raise ConfigError(
            f"bench prefill: preset v41-rank fills about 96 GiB of a GPU and the device is {device}; "
            "--preset tiny runs on a CPU"
        )
    name = {"v41-rank": "config.full.json", "tiny": "config.tiny.json"}[args.preset]
    config = ModelConfig.from_file(Path(str(resources.files("minideepinfer") / "data" / name)))
    problem = replace(PRESETS[args.preset], num_layers=args.layers)
    if args.steps is not None:
        problem = replace(problem, steps=args.steps)
    if args.output:
        _open(args.output, "a").close()  # what cannot be written is better known before minutes of measuring
    bench = PrefillBench(config, engine, problem)
    print("\n".join(header(bench)), flush=True)
    result = bench.run()
    print("\n".join(lines(bench, result)))
    if args.output:
        with _open(args.output, "w") as file:
            file.write(json.dumps(record(bench, result), indent=1) + "\n")
    return 0


def _open(path: str, mode: str) -> TextIO:
    try:
        return cast(TextIO, Path(path).open(mode, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror or error})") from None


def header(bench: PrefillBench) -> list[str]:
    """What is measured, before it is."""
    problem, engine = bench.problem, bench.engine_config
    precision = f"{bench.dtype_name}, kv {engine.kv_quantization}, activations {engine.activation_quantization}"
    layers = f"{len(bench.model.blocks)} of {bench.config.num_hidden_layers} layers"
    engram = f"{problem.engram_fraction:.3g} of the rank's Engram rows"
    return [
        f"one rank of {problem.world_size}, no network; {precision}; replay {engine.replay}; {layers}; {engram}",
        f"{problem.new_tokens} new tokens behind {problem.context - problem.new_tokens} cached ones, on {bench.device}",
        *bench.plan.lines(),
        "the other ranks are made up: their tokens are random, and the plan's comm operator is not called",
    ]


def lines(bench: PrefillBench, result: PrefillResult) -> list[str]:
    """The result, for people."""
    median = statistics.median(result.milliseconds)
    low, mean, high = result.rows_per_expert
    total = sum(row.milliseconds for row in result.stages)
    text = [
        f"step {median:.1f} ms (min {min(result.milliseconds):.1f}, max {max(result.milliseconds):.1f}, "
        f"{len(result.milliseconds)} steps): {1e3 * bench.problem.new_tokens / median:.0f} tokens/s",
        f"rows per expert: min {low}, mean {mean:.1f}, max {high}"
        + (f"; peak memory {result.peak_bytes / 2**30:.1f} GiB" if result.peak_bytes else ""),
        f"stages (mean step {result.staged_milliseconds:.1f} ms while they are timed):",
    ]
    text += [f"  {row.stage:<14} {row.milliseconds:9.2f} ms {row.share:6.1%} {row.calls:6d}" for row in result.stages]
    rest = result.staged_milliseconds - total
    return [*text, f"  {'other':<14} {rest:9.2f} ms (between stages)"]


def record(bench: PrefillBench, result: PrefillResult) -> dict[str, Any]:
    """The result, as data."""
    from dataclasses import asdict

    import torch

    cuda = bench.device.type == "cuda"
    return {
        "benchmark": "prefill: one rank, no network",
        "problem": asdict(bench.problem),
        "layers": len(bench.model.blocks),
        "engine": bench.engine_config.model_dump(),
        "plan": bench.plan.to_dict(),
        "device": torch.cuda.get_device_name(bench.device) if cuda else "cpu",
        "torch": torch.__version__,
        "tokens_per_second": 1e3 * bench.problem.new_tokens / statistics.median(result.milliseconds),
        **asdict(result),
    }
