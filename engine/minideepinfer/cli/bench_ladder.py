"""The commands `mini-deepinfer bench ladder` and `bench report`."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minideepinfer.cli.bench_steps import model_of, say
from minideepinfer.errors import ConfigError, MiniDeepInferError, OperatorError
from minideepinfer.measure.ladder.file import PRESETS

if TYPE_CHECKING:
    from minideepinfer.measure.record import Record

RECORDS, REPORT = "ladder.json", "ladder.md"


def add_ladder(actions: Any) -> None:
    """Register `bench ladder`."""
    parser = actions.add_parser(
        "ladder", help="plans one after the other in one session, with three layers of evidence"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("file", nargs="?", metavar="FILE", help="the rungs, in TOML; default: those of the preset")
    what.add_argument("--preset", choices=PRESETS, default="v41-rank", help="default: v41-rank, made for one H200")
    _add_out(parser)
    parser.set_defaults(run=_ladder)


def add_report(actions: Any) -> None:
    """Register `bench report`."""
    parser = actions.add_parser("report", help="a ladder's report and pictures from its records; runs nothing")
    parser.add_argument("records", metavar="RECORDS", help=f"file of records, e.g. {RECORDS}")
    _add_out(parser)
    parser.set_defaults(run=_report)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", required=True, help=f"where {REPORT} and its pictures go")


def _ladder(args: argparse.Namespace) -> int:
    from minideepinfer.measure.ladder.file import packaged_ladder, read_ladder
    from minideepinfer.measure.ladder.pictures import FILES
    from minideepinfer.measure.ladder.session import run_ladder
    from minideepinfer.measure.record import require_writable, write_records

    ladder = read_ladder(args.file) if args.file else packaged_ladder(args.preset)
    out = _directory(args.out)
    _require_extras()  # what cannot be drawn, checked or written is better known before minutes of measuring
    for name in (RECORDS, REPORT, *FILES):
        require_writable(out / name)
    records: list[Record] = []

    def keep(record: Record) -> None:
        write_records(out / RECORDS, [*records, record])
        records.append(record)
        print(_line(record), flush=True)

    try:
        run_ladder(model_of(ladder.preset, ladder.rungs[0].engine), ladder, keep, say)
    except MiniDeepInferError as error:
        if not records:
            raise
        raise type(error)(f"{error}; {out / RECORDS} has the records of the rungs before it") from error
    except KeyboardInterrupt:
        if records:
            say(f"{out / RECORDS} has the records of the rungs before it; `bench report` makes a report of them")
        raise
    _write(records, out, str(out / RECORDS))
    return 0


def _report(args: argparse.Namespace) -> int:
    from minideepinfer.measure.record import read_records

    _write(read_records(args.records), _directory(args.out), args.records)
    return 0


def _write(records: list[Record], out: Path, source: str) -> None:
    from minideepinfer.measure.ladder.pictures import draw
    from minideepinfer.measure.ladder.report import render

    text = render(records, source=source)
    try:
        (out / REPORT).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out / REPORT}: cannot be written ({error.strerror or error})") from None
    for path in (out / REPORT, *draw(records, out)):
        print(f"wrote {path}")


def _directory(path: str) -> Path:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be made ({error.strerror or error})") from None
    return Path(path)


def _require_extras() -> None:
    from minideepinfer.measure.ladder.pictures import library

    library()
    if importlib.util.find_spec("hypothesis") is None:
        raise OperatorError(
            "bench ladder checks the kernels that it times with the conformance kit, which needs hypothesis: "
            "pip install 'mini-deepinfer[report,testing]'"
        )


def _line(record: Record) -> str:
    from minideepinfer.measure.ladder.report import largest_error

    step, speed = record.values["step"], record.values["tokens_per_second"]
    return f"{record.name}: step {step.median:.1f} ms, {speed.median:.0f} tokens/s, error {largest_error(record)}"
