"""The two pictures of a ladder: the step by stage over the rungs, and throughput by rung; SVG and PNG, 1000 px wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minideepinfer.errors import ConfigError
from minideepinfer.measure.record import Record
from minideepinfer.operators.context import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS, THROUGHPUT = "ladder-steps", "ladder-throughput"
"""Names of the files, without `.svg` and `.png`."""
FILES = tuple(f"{name}.{kind}" for name in (STEPS, THROUGHPUT) for kind in ("svg", "png"))

_COLOURS = {
    Stage.ATTENTION: "#2f6db3",
    Stage.KEY_GATHER: "#8fbbe8",
    Stage.PROJECTIONS: "#17a2a2",
    Stage.INDEXER: "#7b4fa3",
    Stage.MIXING: "#3d9a50",
    Stage.GATE: "#e5c43c",
    Stage.GROUPED_GEMM: "#d9542b",
    Stage.FP4_DECODING: "#f4a582",
    Stage.SHARED_EXPERT: "#9c2f2f",
    Stage.COMBINE: "#c77cba",
    Stage.COMMUNICATION: "#5c4033",
    Stage.ENGRAM: "#a8b820",
    Stage.HEAD: "#56657f",
    Stage.OTHER: "#b8b8b8",
}
_SPARE = ("#404040", "#ff9db5", "#6a7f10", "#00806a")
"""Of stages that only one operator knows."""
_SMALL = 0.004
"""A stage below this share of every bar is drawn with the others of its size."""
_ZOOM = 4.0
"""Rungs this many times shorter than the longest get a second panel, with their own scale."""
_WIDTH, _DPI = 10.0, 100


def draw(records: Sequence[Record], directory: Path) -> list[Path]:
    """Draw both pictures of a ladder's records.

    Returns:
        The files, `ladder-{steps,throughput}.{svg,png}`.

    Raises:
        ConfigError: matplotlib is missing, or a file cannot be written.
    """
    matplotlib = library()
    # Text stays text, and the same records give the same file.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "mini-deepinfer", "font.size": 10.5}
    settings["text.parse_math"] = False  # a `$` in a name is a `$`
    files = []
    with matplotlib.rc_context(settings):
        for name, figure in ((STEPS, _steps(records)), (THROUGHPUT, _throughput(records))):
            files += [_save(figure, directory / f"{name}.svg"), _save(figure, directory / f"{name}.png")]
    return files


def library() -> Any:
    """matplotlib.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib, which is not installed: pip install 'mini-deepinfer[report]'"
        ) from None
    return matplotlib


def _save(figure: Figure, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


def _steps(records: Sequence[Record]) -> Figure:
    """A stacked bar for each rung; where rungs differ widely, the shorter ones once more with their own scale."""
    longest = max(_step(record) for record in records)
    short = [record for record in records if _step(record) < longest / _ZOOM]
    panels = [list(records), *([short] if short else [])]
    stages = _drawn_stages(records)
    colours = _colours(stages)
    rows = sum(len(panel) for panel in panels)
    legend = 0.28 * -(-len(stages) // 4) + 0.35
    figure = _figure(height=0.45 * rows + 0.85 * len(panels) + legend)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(panel) + 0.6 for panel in panels])[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _stacked(axis, panel, stages, colours)
    axes[0].set_title("One step by stage, milliseconds", loc="left", fontsize=12)
    if short:
        axes[1].set_title("The shorter steps again", loc="left", fontsize=12)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _stacked(axis: Axes, records: Sequence[Record], stages: Sequence[str], colours: dict[str, str]) -> None:
    places = range(len(records))
    left = [0.0] * len(records)
    for stage in stages:
        widths = [_drawn(record, stages)[stage] for record in records]
        axis.barh(places, widths, left=left, height=0.68, color=colours[stage], label=stage)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, record, end in zip(places, records, left, strict=True):
        axis.annotate(f" {_number(_step(record))} ms{_layers_note(record, records)}", (end, place), va="center")
    _finish(axis, records, max(left))


def _throughput(records: Sequence[Record]) -> Figure:
    figure = _figure(height=0.45 * len(records) + 0.95)
    axis = figure.subplots()
    speeds = [record.values["tokens_per_second"] for record in records]
    medians = [speed.median for speed in speeds]
    whole = max(_layers(record) for record in records)
    colours = ["#2f6db3" if _layers(record) == whole else "#b8b8b8" for record in records]
    axis.barh(range(len(records)), medians, height=0.68, color=colours)
    for place, (record, median) in enumerate(zip(records, medians, strict=True)):
        axis.annotate(f" {median:,.0f}{_layers_note(record, records)}", (median, place), va="center")
    axis.set_title("Throughput, tokens/s", loc="left", fontsize=12)
    _finish(axis, records, max(medians))
    return figure


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, max(2.2, height)), layout="constrained", facecolor="white")


def _finish(axis: Axes, records: Sequence[Record], largest: float) -> None:
    """Names of the rungs from top to bottom, and room for the number at the end of the longest bar."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_yticks(range(len(records)), [_name(record) for record in records])
    axis.set_ylim(len(records) - 0.4, -0.6)
    axis.set_xlim(0, largest * (1.3 if any(_layers_note(record, records) for record in records) else 1.14))
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _name(record: Record) -> str:
    """A rung's name on at most two lines."""
    lines = textwrap.wrap(record.name, 26) or [record.name]
    if len(lines) > 2:
        rest = " ".join(lines[1:])
        short = textwrap.shorten(rest, 26, placeholder="…")
        lines = [lines[0], short if len(short) > 1 else f"{rest[:25]}…"]  # one long word would leave nothing
    return "\n".join(lines)


def _layers_note(record: Record, records: Sequence[Record]) -> str:
    """A rung's layers, where rungs differ in them."""
    return f", {_layers(record)} layers" if len({_layers(other) for other in records}) > 1 else ""


def _drawn_stages(records: Sequence[Record]) -> list[str]:
    """Stages that are wide enough somewhere, in the order of `Stage`; what is left is the last one."""
    named = dict.fromkeys([*map(str, Stage), *(stage for record in records for stage in record.stages)])
    named.pop(str(Stage.OTHER))
    wide = [s for s in named if any(r.stages.get(s, 0.0) >= _SMALL * sum(r.stages.values()) > 0 for r in records)]
    return [*wide, str(Stage.OTHER)]


def _drawn(record: Record, stages: Sequence[str]) -> dict[str, float]:
    """Milliseconds of the drawn stages, which add up to the step.

    Stages were timed in steps of their own, which take a little longer: their shares are drawn.
    """
    total = sum(record.stages.values())
    scale = _step(record) / total if total else 0.0
    drawn = {stage: record.stages.get(stage, 0.0) * scale for stage in stages[:-1]}
    return drawn | {stages[-1]: max(0.0, _step(record) - sum(drawn.values()))}


def _colours(stages: Sequence[str]) -> dict[str, str]:
    known = {str(stage): colour for stage, colour in _COLOURS.items()}
    strangers = [stage for stage in stages if stage not in known]
    return known | {stage: _SPARE[index % len(_SPARE)] for index, stage in enumerate(strangers)}


def _step(record: Record) -> float:
    return record.values["step"].median


def _layers(record: Record) -> int:
    return int(record.problem.get("layers", 0))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
