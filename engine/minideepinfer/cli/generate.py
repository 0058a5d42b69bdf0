"""The command `mini-deepinfer generate`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minideepinfer.cli.options import add_engine_options, engine_config
from minideepinfer.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from minideepinfer.runtime.llm import LLM
    from minideepinfer.runtime.outputs import Chunk
    from minideepinfer.runtime.params import SamplingParams

DEFAULT_PROMPT = "The sqlite3_open() function"


_HELP = {"n": "continuations; the prompt is computed once for all of them"}


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("generate", help="continue a prompt and show where the time goes")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("text", nargs="?", help=f"prompt text (default: {DEFAULT_PROMPT!r})")
    prompt.add_argument("--ids", type=_ids, metavar="1,2,3", help="prompt as token ids, taken as given")
    parser.add_argument("--model", default="tiny", help="a checkpoint directory, or tiny (the default)")
    parser.add_argument("--json", action="store_true", help="print data")
    parser.add_argument(
        "--nproc", type=_number_of_ranks, metavar="N", help="start N ranks here, each with a share of the experts"
    )
    sampling = parser.add_argument_group("sampling; a parameter left out has the default of SamplingParams")
    for name, kind in (("max-tokens", int), ("min-tokens", int), ("temperature", float), ("top-p", float)):
        sampling.add_argument(f"--{name}", type=kind, metavar="N")
    for name in ("top-k", "seed", "logprobs", "n"):
        sampling.add_argument(f"--{name}", type=int, metavar="N", help=_HELP.get(name))
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on behind the end token")
    add_engine_options(parser)
    parser.set_defaults(run=_run)


def _ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ids such as 1,2,3") from None


def _number_of_ranks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks such as 2")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    from minideepinfer.runtime.launch import is_rank, launch

    if args.nproc is not None:
        if (asked := engine_config(args).parallel.expert) not in (1, args.nproc):
            raise ConfigError(
                f"--nproc is {args.nproc}, but the engine config asks for {asked} ranks; leave one of them out"
            )
        args.settings = [*args.settings, ("parallel.expert", args.nproc)]
    config, params = engine_config(args), _params(args)
    if (args.nproc or 1) > 1 and not is_rank():
        return launch(args.arguments, args.nproc)
    prompt = args.ids if args.ids is not None else (args.text if args.text is not None else DEFAULT_PROMPT)

    from minideepinfer.measure.stages import StageTimer
    from minideepinfer.runtime.llm import LLM
    from minideepinfer.runtime.problems import resolve_device

    timer = StageTimer(resolve_device(config))
    with _progress() as progress:
        task = progress.add_task("load")
        llm = LLM(
            args.model, config, clock=timer, progress=lambda done, n: progress.update(task, completed=done, total=n)
        )
    with llm:
        timer.reset()
        if not args.json:
            print("\n".join(llm.engine.runner.plan.lines()), end="\n\n")
        continuations, interrupted = _continue(llm, prompt, params, quiet=args.json)
        report = _report(llm, continuations, timer)
        if args.json:
            print(json.dumps(report, indent=1))
        else:
            _print_report(report)
    if interrupted:
        raise KeyboardInterrupt
    return 0


def _params(args: argparse.Namespace) -> SamplingParams:
    from minideepinfer.runtime.params import SamplingParams

    given = {name: getattr(args, name) for name in SamplingParams.model_fields if getattr(args, name, None) is not None}
    return SamplingParams(**given)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal or os.environ.get("RANK", "0") != "0"
    )


def _continue(
    llm: LLM, prompt: str | list[int], params: SamplingParams, *, quiet: bool
) -> tuple[list[list[Chunk]], bool]:
    """Chunks of each continuation until the end or Ctrl-C, and which of the two it was.

    The text of the first one appears as it comes, that of the others behind it.
    """
    seed, *seeds = params.seeds
    generations = [llm.start(prompt, params.seeded(seed))]
    generations += llm.fork(generations[0], len(seeds), seeds) if seeds else []
    continuations: list[list[Chunk]] = [[] for _ in generations]
    has_text, interrupted = llm.engine.runner.tokenizer.backend is not None, False
    if not quiet and isinstance(prompt, str):
        print(prompt, end="", flush=True)
    try:
        with _progress() as progress:
            task = progress.add_task("prefill")
            llm.engine.on_step = lambda request: progress.update(
                task, completed=request.num_computed_tokens, total=request.num_prompt_tokens
            )
            while not generations[0].chunks:
                llm.step()
        llm.engine.on_step = None
        while llm.engine.busy or any(generation.chunks for generation in generations):
            for chunks, generation in zip(continuations, generations, strict=True):
                while generation.chunks:
                    chunks.append(generation.chunks.popleft())
                    if not quiet and generation is generations[0]:
                        print(_shown(chunks[-1], has_text), end="", flush=True)
            llm.step()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for generation in reversed(generations):
            llm.abort(generation)
        if not quiet:
            print(flush=True)
    for index, chunks in enumerate([] if quiet else continuations[1:], 1):
        print(f"[{index}] " + "".join(_shown(chunk, has_text) for chunk in chunks))
    return continuations, interrupted


def _shown(chunk: Chunk, has_text: bool) -> str:
    return chunk.text if has_text else "".join(f"{i} " for i in chunk.token_ids)


def _report(llm: LLM, continuations: list[list[Chunk]], timer: Any) -> dict[str, Any]:
    engine = llm.engine
    totals, runner, caches = engine.throughput, engine.runner, engine.cache_statistics
    first, *others = [_joined(chunks) for chunks in continuations]
    return {
        **first,
        "other_continuations": others,
        "stages": [vars(row) for row in timer.table()],
        "prefill_tokens": totals.prefill_tokens,
        "prefill_tokens_per_s": totals.prefill_tokens / totals.prefill_seconds if totals.prefill_seconds else None,
        "decode_tokens": totals.decode_tokens,
        "decode_tokens_per_s": totals.decode_tokens / totals.decode_seconds if totals.decode_seconds else None,
        "work": asdict(engine.work),
        "peak_memory_bytes": _peak_memory(runner.device.type),
        "cache_layout": caches.layout,
        "cache_bytes": caches.num_bytes,
        "cache_bytes_per_token": caches.bytes_per_token,
        "cache_bytes_per_request": caches.bytes_per_request,
        "prefix": None if caches.prefix is None else asdict(caches.prefix),
        "forks": asdict(caches.forks),
        "checkpoint_bytes_read": runner.bytes_read,
        "checkpoint_bytes_skipped": runner.skipped_bytes,
        "plan": runner.plan.to_dict()["operators"],
    }


def _joined(chunks: list[Chunk]) -> dict[str, Any]:
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason if chunks else None,
        "logprobs": [entry for chunk in chunks for entry in chunk.logprobs or []],
    }


def _peak_memory(device_type: str) -> int | None:
    """Peak bytes on the device, or of this process; None where the system does not tell."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", "ms", "share", "calls", title="Stages")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report["stages"]:
        table.add_row(row["stage"], f"{row['milliseconds']:.1f}", f"{row['share']:.1%}", str(row["calls"]))
    console = Console()
    console.print(table)
    for phase in ("prefill", "decode"):
        rate, tokens = report[f"{phase}_tokens_per_s"], report[f"{phase}_tokens"]
        print(f"{phase}: {tokens} tokens, {rate:.0f} tokens/s" if rate else f"{phase}: no tokens")
    peak = report["peak_memory_bytes"]
    print(f"peak memory: {peak / 2**20:.0f} MiB" if peak else "peak memory: unknown", end="; ")
    read, skipped = report["checkpoint_bytes_read"], report["checkpoint_bytes_skipped"]
    print(f"read {read / 1e6:.1f} MB of the checkpoint, skipped {skipped / 1e6:.1f} MB (draft and vision)")
    work = report["work"]
    print(
        f"work: {work['encoder_rows']} rows before the candidate source, {work['decoder_rows']} from it on; "
        f"{work['layer_rows']} rows x layers"
    )
    _print_caches(report)


def _print_caches(report: dict[str, Any]) -> None:
    size, token, ring = (report[f"cache_bytes{part}"] for part in ("", "_per_token", "_per_request"))
    print(f"caches ({report['cache_layout']}): {size / 2**20:.0f} MiB, {token:g} bytes a token, {ring} a request")
    if prefix := report["prefix"]:
        print(
            f"prefix cache: {prefix['hits']} hits of {prefix['lookups']} prompts, {prefix['hit_tokens']} of "
            f"{prefix['lookup_tokens']} tokens; {prefix['evicted_pages']} pages evicted"
        )
    if any((forks := report["forks"]).values()):
        print(
            f"forks: {forks['forks']}, {forks['shared_pages']} pages shared, {forks['copied_pages']} copied; "
            f"{forks['started_over']} started over"
        )
