"""The report of a ladder, from its records alone: three layers of evidence, stages, errors, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minideepinfer.measure.compare import Change
from minideepinfer.measure.ladder import KERNEL, KERNEL_BEFORE
from minideepinfer.measure.ladder.one_session import check, operators_of
from minideepinfer.measure.ladder.pictures import STEPS, THROUGHPUT
from minideepinfer.measure.record import Measurement, Record


def render(records: Sequence[Record], source: str = "") -> str:
    """Markdown, with the pictures of `pictures.draw` beside it.

    Args:
        records: of one ladder, in order; see `check`.
        source: where the records lie, for the reader.
    """
    check(records)
    parts = [
        f"# {records[0].problem.get('ladder', 'The ladder')}",
        _introduction(records, source),
        "## Rungs",
        _rungs(records),
        f"![Throughput by rung]({THROUGHPUT}.svg)",
        "## Kernel, stage, step",
        _evidence(records),
        "## Stages",
        f"![The step by stage]({STEPS}.svg)",
        _stages(records),
        "## Errors against the first rung",
        _errors(records),
        "## What ran",
        _plans(records),
        "## Conditions",
        _conditions(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(records: Sequence[Record], source: str) -> str:
    first = records[0]
    text = [f"The first rung: {first.headline}."]
    text.append(
        f"One session on one {first.machine.device}; every time below is of this session, and gains are never added. "
        "A rung that is slower stays in the table; the next one says what it builds on."
    )
    there = {record.name for record in records}
    if missing := [name for name in first.problem.get("rungs", []) if name not in there]:
        text.append(f"Rungs of this ladder without a record: {', '.join(missing)}.")
    if source:
        text.append(f"Written by `mini-deepinfer bench report {source}`; the records have every number.")
    return "\n".join(text)


def _rungs(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        base = _base(record, records)
        step = record.values["step"]
        rows.append(
            [
                record.name,
                record.problem.get("says", ""),
                base.name if base else "",
                f"{number(step.median)} " + (f"± {step.spread / 2:.1%}" if step.repeats > 1 else "(once)"),
                f"{record.values['tokens_per_second'].median:,.0f}{_layers(record, records)}",
                _ratio(record, records[0]),
                _ratio(record, base),
                _over_floor(record),
                largest_error(record),
            ]
        )
    heads = ["rung", "what is new", "builds on", "step, ms", "tokens/s", "× first", "× before", "× floor"]
    heads.append("largest error")
    return _table(heads, rows, numbers=range(3, 9)) + (
        "\n\n± is half of the distance between the 20th and 80th percentile. `× before` is the speed against the rung "
        "that it builds on; no ratio stands where layers differ, and one is *within the spread* if "
        "the intervals between those percentiles overlap. `× floor` is the step over the sum of its stages' floors, at "
        "the rates of this session."
    )


def _over_floor(record: Record) -> str:
    floor = record.floors.get("step")
    return f"{record.values['step'].median / floor:.2f}" if floor else "–"


def _layers(record: Record, records: Sequence[Record]) -> str:
    differ = len({other.problem.get("layers") for other in records}) > 1
    return f" ({record.problem.get('layers')} layers)" if differ else ""


def _ratio(record: Record, other: Record | None) -> str:
    if other is None or record.problem.get("layers") != other.problem.get("layers"):
        return "–"
    speed = Change("tokens_per_second", other.values["tokens_per_second"], record.values["tokens_per_second"])
    ratio = speed.after.median / speed.before.median
    hidden = " (within the spread)" if speed.within_spread and record is not other else ""
    return (f"{ratio:.3f}" if 0.1 < ratio < 1.05 else f"{ratio:.2f}" if 1 < ratio < 10 else f"{ratio:.3g}") + hidden


def largest_error(record: Record) -> str:
    """The largest error of a module, and which."""
    modules = {name: error for name, error in record.errors.items() if _is_module(name)}
    if not modules:
        return "not measured"
    name = max(modules, key=modules.__getitem__)
    return f"{_error(modules[name])} ({name})" if modules[name] else "0"


def _is_module(name: str) -> bool:
    """Whether an error is that of a module at its worst layer."""
    return not name.startswith(("layers.", KERNEL))


def _evidence(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        base = _base(record, records)
        if base is None:
            continue
        alike = base.problem.get("layers") == record.problem.get("layers")
        changed = _changed(record, base) if alike else []
        stages = [f"{stage}: {_stage(base, stage)} → {_stage(record, stage)}" for stage in changed]
        rows.append(
            [
                record.name,
                "<br>".join(_kernel(record, name) for name in _kernels(record)) or "–",
                "<br>".join(stages) or "–",
                f"{number(base.values['step'].median)} → {number(record.values['step'].median)}"
                if alike
                else f"{number(record.values['step'].median)}{_layers(record, records)}",
                largest_error(record),
            ]
        )
    if not rows:
        return "One rung; nothing to compare."
    return (
        "Milliseconds, before → after. *Kernel*: one call of the operator that is new, on each problem of "
        "`bench kernel`, and of the one that it replaces beside it; the error is the difference of their outputs. "
        "*Stage*: those that changed most. *Step*: end to end.\n\n"
        + _table(["rung", "kernel", "stage", "step", "largest error"], rows)
    )


def _kernels(record: Record) -> list[str]:
    return [
        name.removeprefix(KERNEL)
        for name in record.values
        if name.startswith(KERNEL) and not name.startswith(KERNEL_BEFORE)
    ]


def _kernel(record: Record, name: str) -> str:
    floor, error = record.floors.get(f"{KERNEL}{name}"), record.errors.get(f"{KERNEL}{name}")
    beside = [f"floor {number(floor)}"] if floor else []
    beside += [] if error is None else [f"error {_error(error)}"]
    before = record.values.get(f"{KERNEL_BEFORE}{name}")
    times = f"{_median(before)} → {_median(record.values[f'{KERNEL}{name}'])}"
    return f"{name}: {times}" + (f" ({', '.join(beside)})" if beside else "")


def _median(value: Measurement | None) -> str:
    return "–" if value is None else number(value.median)


def _changed(record: Record, base: Record) -> list[str]:
    """The stage that changed most, and others that changed at least a fifth as much."""
    names = dict.fromkeys([*base.stages, *record.stages])
    changes = {stage: abs(record.stages.get(stage, 0.0) - base.stages.get(stage, 0.0)) for stage in names}
    largest = max(changes.values(), default=0.0)
    return [stage for stage in sorted(names, key=lambda stage: -changes[stage]) if changes[stage] > largest / 5]


def _stage(record: Record, stage: str) -> str:
    if stage in record.stages:
        return number(record.stages[stage])
    return f"in {record.inside[stage]}" if stage in record.inside else "–"


def _stages(records: Sequence[Record]) -> str:
    longest = max(records, key=lambda record: sum(record.stages.values()))
    names = dict.fromkeys([*longest.stages, *(s for r in records for s in [*r.stages, *r.inside])])
    best = min(records, key=lambda record: record.values["step"].median)
    floor = {stage: number(best.floors[stage]) if stage in best.floors else "" for stage in names}
    rows = [[stage, *(_stage(record, stage) for record in records), floor[stage]] for stage in names]
    rows.append(["**sum**", *(number(sum(record.stages.values())) for record in records), ""])
    of_step = number(best.floors["step"]) if "step" in best.floors else ""
    rows.append(["**step**", *(number(record.values["step"].median) for record in records), of_step])
    for title, value in (("step while stages are timed", "step_with_stages"), ("kernels of a traced step", "kernels")):
        if any(value in record.values for record in records):
            rows.append([title, *(_median(record.values.get(value)) for record in records), ""])
    heads = ["ms", *(record.name for record in records), f"floor of {best.name}"]
    return _table(heads, rows, numbers=range(1, len(heads))) + (
        "\n\nExclusive milliseconds. Stages are timed in steps of their own; the picture draws their shares of the "
        "step. Where the time between kernels is `in stages`, waiting for the host counts in the stage that waits."
    )


def _errors(records: Sequence[Record]) -> str:
    """Modules first, then whole blocks by layer."""
    names = dict.fromkeys(name for record in records for name in record.errors)
    modules = [name for name in names if _is_module(name)]
    blocks = [name for name in names if name.startswith("layers.") and name.endswith(".block")]
    if not modules:
        return "Not measured."
    rows = [[_title(name), *(_error(record.errors.get(name)) for record in records)] for name in [*modules, *blocks]]
    table = _table(["", *(record.name for record in records)], rows, numbers=range(1, len(records) + 1))
    return _ABOUT_ERRORS + "\n\n" + table


_ABOUT_ERRORS = (
    "Logits of a random model are chaotic, so each module runs on what the first rung computed in the same step: its "
    "inputs, entries, selection, candidates and routing. Norm of the difference over the norm, at the worst of the "
    "layers looked at, one of each kind (the rows `layer L` are theirs, for what the whole block adds to the streams); "
    "for selection, candidates and routing, free in this comparison, the share of the first rung's choices that are "
    "missing. The column of the first rung is the same comparison of its own repetition."
)


def _title(name: str) -> str:
    return f"layer {name.split('.')[1]}, whole block" if name.startswith("layers.") else name


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}" if value else "0"


def _plans(records: Sequence[Record]) -> str:
    return "\n".join(f"- **{record.name}**: {_plan(record)}{_precision(record, records[0])}" for record in records)


def _precision(record: Record, first: Record) -> str:
    """Switches that are not those of the first rung; replay is said of every one."""
    changed = {k: v for k, v in record.precision.items() if k != "replay" and v != first.precision.get(k)}
    return "".join(f"; {name} {value}" for name, value in changed.items())


def _plan(record: Record) -> str:
    chosen: dict[str, dict[str, None]] = {}
    for entry in operators_of(record):
        options = "".join(f" {key}={value}" for key, value in entry.get("options", {}).items())
        text = f"{entry['operator']}{options} ({entry['distribution']} {entry['version']})"
        if entry["phase"] == "prefill":
            chosen.setdefault(entry["family"], {})[text] = None
    text = "; ".join(f"{family} {' and '.join(names)}" for family, names in chosen.items())
    replay = record.precision.get("replay")
    return text + (f"; replay {replay}" if replay else "")


def _conditions(records: Sequence[Record]) -> str:
    first = records[0]
    machine, software = first.machine, first.software
    limit = f", {machine.power_limit_watts:.0f} W" if machine.power_limit_watts else ""
    lines = [f"- {machine.device}{limit}" + (f", driver {machine.driver}" if machine.driver else "")]
    clocks = [record.machine.sm_clock_mhz for record in records if record.machine.sm_clock_mhz]
    if clocks:
        seen = [clock for pair in clocks for clock in pair]
        lines[0] += f"; SM clock before and after the rungs {min(seen)} to {max(seen)} MHz"
    reasons = sorted({reason for record in records for reason in record.machine.throttled})
    lines[0] += f"; throttled: {', '.join(reasons)}" if reasons else ""
    state = " with changes" if software.dirty else ""
    versions = ", ".join(f"{name} {version}" for name, version in software.versions.items())
    lines.append(f"- commit {software.commit or 'unknown'}{state}; {versions}")
    precision = ", ".join(f"{key} {value}" for key, value in first.precision.items())
    lines.append(f"- seed {first.seed}; the first rung has {precision}")
    if first.rates:
        lines.append(f"- rates of the same session: {', '.join(f'{k} {v:.4g}' for k, v in first.rates.items())}")
    steps = ", ".join(f"{record.name} {record.values['step'].repeats}" for record in records)
    lines.append(f"- measured steps: {steps}")
    if all("peak_memory" in record.values for record in records):
        peaks = [record.values["peak_memory"].median / 2**30 for record in records]
        lines.append(
            f"- peak memory of a rung {min(peaks):.1f} to {max(peaks):.1f} GiB, what the ladder keeps included"
        )
    lines += [f"- {note}" for note in dict.fromkeys(note for record in records for note in record.notes)]
    return "\n".join(lines)


def _base(record: Record, records: Sequence[Record]) -> Record | None:
    """The rung that this one builds on."""
    name = record.problem.get("builds_on")
    return next((other for other in records if other.name == name), None)


def number(value: float) -> str:
    """Milliseconds with three figures, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    right = set(numbers)
    rule = ["---:" if column in right else "---" for column in range(len(heads))]
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in [heads, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])
