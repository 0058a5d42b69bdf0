"""The command `mini-deepinfer bench compare`: two files of records, and a gate for regressions."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from minideepinfer.errors import ConfigError

if TYPE_CHECKING:
    from minideepinfer.measure.compare import Pair
    from minideepinfer.measure.record import Record

GATED = "ratio_to_naive"
RUNS = "times are of two runs, which may differ by more than the spread within one; ratios within a run are what counts"
QUIET = ("flops", "bytes", "tflops", "gb_s")
"""Values that follow from others."""


def add_compare(actions: Any) -> None:
    """Register the action."""
    parser = actions.add_parser("compare", help="two files of records: what changed, and what cannot be compared")
    parser.add_argument("before", metavar="A", help="file of records")
    parser.add_argument("after", metavar="B", help="file of records")
    parser.add_argument(
        "--fail-over",
        type=_share,
        metavar="PERCENT",
        help="exit with 1 if a kernel of A got slower by more than this beyond the spread, in ratio to naive of its "
        "own run, e.g. 5%%, or is missing in B",
    )
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    from minideepinfer.measure.compare import compare, gate
    from minideepinfer.measure.record import read_records

    before, after = read_records(args.before), read_records(args.after)
    pairs = compare(before, after)
    print(f"A: {args.before}, {_origin(before)}\nB: {args.after}, {_origin(after)}")
    for pair in pairs:
        print("\n".join(_lines(pair)))
    if any(change.before.unit == "ms" for pair in pairs for change in pair.changes):
        print(RUNS)
    refused = [pair.title for pair in pairs if pair.differences]
    if refused:
        print(f"{len(refused)} of {len(pairs)} cannot be compared")
    if args.fail_over is None:
        return 1 if refused else 0
    found, allowed = gate(pairs, GATED, args.fail_over), f"{100 * args.fail_over:.6g} %"
    if not any((found.passed, found.failed, found.undecided, refused)):
        raise ConfigError(f"--fail-over: no kernel of the first file has a {GATED}, so that nothing would ever fail")
    for word, lines in (("FAILED", found.failed), ("UNDECIDED", found.undecided)):
        print("".join(f"{word} {line}\n" for line in lines), end="")
    print(
        f"{GATED}, {allowed} allowed: {len(found.passed)} passed, {len(found.failed)} failed, "
        f"{len(found.undecided)} undecided"
    )
    return 1 if refused or found.failed else 0


def _lines(pair: Pair) -> list[str]:
    if pair.before is None or pair.after is None:
        return [f"{pair.title}: only in {'B' if pair.before is None else 'A'}"]
    if pair.differences:
        return [f"{pair.title}: cannot be compared", *(f"  {difference}" for difference in pair.differences)]
    lines = [pair.title]
    for change in pair.changes:
        if change.name in QUIET:
            continue
        unit = "" if change.before.unit == "1" else f" {change.before.unit}"
        numbers = f"{change.before.median:.4g} -> {change.after.median:.4g}{unit}"
        ratio = "" if change.ratio is None else f", B / A {change.ratio:.3f}"
        lines.append(f"  {change.name:<20} {numbers}{ratio}, {change.verdict}")
    if len(lines) == 1:
        return [f"{pair.title}: nothing was measured in both"]
    return [*lines, *_errors(pair.before, pair.after)]


def _errors(before: Record, after: Record) -> list[str]:
    """Errors that changed; of a ladder's only those of modules at their worst layer."""
    names = [name for name in {**before.errors, **after.errors} if not name.startswith("layers.")]
    shown = {name: [f"{r.errors[name]:.2g}" if name in r.errors else "none" for r in (before, after)] for name in names}
    return [f"  error {name:<14} {old} -> {new}" for name, (old, new) in shown.items() if old != new]


def _origin(records: list[Record]) -> str:
    """Commit and versions of the first record, and what slowed any of them down."""
    software = records[0].software
    dirty = " and changes" if software.dirty else ""
    versions = ", ".join(f"{name} {version}" for name, version in software.versions.items())
    reasons = sorted({reason for record in records for reason in record.machine.throttled})
    slowed = f"; throttled: {', '.join(reasons)}" if reasons else ""
    count = f"{len(records)} {'record' if len(records) == 1 else 'records'}"
    return f"{count}, commit {software.commit[:12] or 'unknown'}{dirty}, {versions}{slowed}"


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage, e.g. 5%") from None
    if not 0 <= share < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a percentage of 0 or more is needed")
    return share
