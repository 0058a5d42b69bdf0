"""Records of steps, for people."""

from __future__ import annotations

from collections.abc import Callable

from minideepinfer.measure.record import Measurement, Record
from minideepinfer.operators import Stage

BETWEEN_KERNELS = "between kernels"
"""The stage in which the GPU waits: for the host, or for a kernel that ends and the next one that starts."""

FIXED = {"context": 131072, "new_tokens": 4096, "world_size": 4, "layers": 40, "hidden_size": 5120, "experts": 384}
SPEC_FLOORS = {"bounded": (112, 73), "full": (201, 126)}
"""Milliseconds of spec section 7 for the fixed benchmark by replay, with bf16 and with FP8 products, on an H200; with
the traffic of the streams, which the section names apart for full replay (7.8 ms)."""


def prefill_lines(record: Record) -> list[str]:
    """The result of `bench prefill`, behind its headline and plan."""
    step, speed = record.values["step"], record.values["tokens_per_second"]
    least, mean, most = (record.values[f"rows_per_expert_{kind}"].median for kind in ("least", "mean", "most"))
    lines = [
        f"step {step.median:.1f} ms ({step.low:.1f} to {step.high:.1f}, {step.repeats} steps): "
        f"{speed.median:,.0f} tokens/s{' a rank' if record.problem.get('ranks', 1) > 1 else ''}",
        f"rows per expert: min {least:.0f}, mean {mean:.1f}, max {most:.0f}{_memory(record)}",
        *_distance(record),
        *(f"note: {note}" for note in record.notes),
    ]
    lines.append(f"floor of all stages {record.floors['step']:.1f} ms, {step.median / record.floors['step']:.2f} times")
    return [*lines, *stage_lines(record)] if record.stages else lines


def decode_lines(record: Record) -> list[str]:
    """One batch of `bench decode`, behind headline and plan."""
    step, speed, moved = (record.values[name] for name in ("step", "tokens_per_second", "bytes"))
    lines = [
        f"{record.name}: step {step.median:.2f} ms ({step.low:.2f} to {step.high:.2f}), {speed.median:,.0f} tokens/s; "
        f"{moved.median / 1e9:.3g} GB at {record.values['bandwidth'].median:.4g} GB/s, "
        f"{step.median / record.floors['step']:.2f} times the floor of {record.floors['step']:.3g} ms",
    ]
    return [*lines, *stage_lines(record)] if record.stages else lines


def prefix_lines(record: Record) -> list[str]:
    """One replay of `bench prefix`, behind headline and plan."""
    cold, hit, speed_up = (record.values[name] for name in ("cold", "hit", "hit_over_cold"))
    lines = [
        f"{record.name}: cold {_run(record, 'cold', cold)}; {_chunks(record)}",
        f"{record.name}: hit {_run(record, 'hit', hit)}; {1 / speed_up.median:.1f} times as fast{_memory(record)}",
    ]
    for name in ("cold", "hit"):
        counted, formula = (record.values[f"{name}_layer_rows{by}"].median for by in ("", "_by_formula"))
        lines.append(f"{record.name}: {name} rows x layers {counted:,.0f}, by formula {formula:,.0f}")
    if "step_over_full" in record.values:
        share = record.values["step_over_full"]
        lines.append(
            f"{record.name}: the decoder skip saves {1 - share.median:.1%} of the step of a chunk that runs all layers "
            f"({1 - share.high:.1%} to {1 - share.low:.1%} of {share.repeats} chunks, side by side)"
        )
    return lines


def _run(record: Record, name: str, time: Measurement) -> str:
    spread = f" ({time.low / 1e3:.3f} to {time.high / 1e3:.3f}, {time.repeats} runs)" if time.repeats > 1 else ""
    return (
        f"{time.median / 1e3:.3f} s{spread}, {record.values[f'{name}_tokens_per_second'].median:,.0f} prompt tokens/s"
    )


def _chunks(record: Record) -> str:
    step = record.values["cold_step"]
    return f"{step.repeats} steps of {step.median:.1f} ms ({step.low:.1f} to {step.high:.1f})"


def stage_lines(record: Record) -> list[str]:
    """The table of stages, with what a reader needs to judge it."""
    total, staged = sum(record.stages.values()), record.values["step_with_stages"].median
    lines = [f"{'stage':<22}{'ms':>9}{'share':>8}{'floor':>9}{'x floor':>9}"]
    lines += [_row(record, stage, total) for stage in sorted(record.stages, key=_place(record))]
    lines += [f"{stage:<22}{text:>17}" for stage, text in _without_time(record).items()]
    lines.append(
        f"{'sum':<22}{total:>9.2f}{'':>8}{sum(record.floors.get(stage, 0.0) for stage in record.stages):>9.2f}"
    )
    overhead, covered = record.values["stage_overhead"], record.values["stages_covered"].median
    lines.append(
        f"with stages timed a step takes {staged:.1f} ms, {overhead.median:+.1%} ({overhead.low:+.1%} to "
        f"{overhead.high:+.1%}) against the step before it, {covered:.1%} of it between events"
    )
    if "kernels" in record.values:
        kernels, step = record.values["kernels"].median, record.values["step"].median
        lines.append(f"kernels of a traced step {kernels:.1f} ms, the step {step:.1f} ms: {step - kernels:+.1f} ms")
    lines.append(f"floors from this run: {', '.join(f'{name} {rate:.4g}' for name, rate in record.rates.items())}")
    return lines


def _row(record: Record, stage: str, total: float) -> str:
    time, floor = record.stages[stage], record.floors.get(stage)
    row = f"{stage:<22}{time:>9.2f}{time / total:>8.1%}"
    row += f"{floor:>9.2f}{time / floor:>9.2f}" if floor else f"{'none':>9}{'':>9}"
    if stage in record.inside:
        row += f"  (more of it in {record.inside[stage]})"
    if stage == Stage.COMMUNICATION and "communication_hidden" in record.values:
        row += f"  (exposed; {record.values['communication_hidden'].median:.2f} ms hidden behind other stages)"
    return row


def _place(record: Record) -> Callable[[str], tuple[int, float]]:
    """Longest first; what is no work of an operator last."""
    last = (Stage.OTHER, BETWEEN_KERNELS)
    return lambda stage: (last.index(stage) if stage in last else -1, -record.stages[stage])


def _without_time(record: Record) -> dict[str, str]:
    """Stages that are fused into others, or that this step does not have."""
    missing = [str(stage) for stage in Stage if stage not in record.stages]
    return {stage: f"in {record.inside[stage]}" if stage in record.inside else "absent" for stage in missing}


def _memory(record: Record) -> str:
    peak = record.values.get("peak_memory")
    return f"; peak memory {peak.median / 2**30:.1f} GiB" if peak else ""


def _distance(record: Record) -> list[str]:
    """How far the fixed benchmark is from the floors of the specification."""
    floors = SPEC_FLOORS.get(record.precision.get("replay", ""))
    if floors is None or any(record.problem.get(name) != size for name, size in FIXED.items()):
        return []
    step = record.values["step"].median
    exact, fast = floors
    return [
        f"floors of spec section 7: {exact} ms in bf16, {fast} ms with FP8 products; "
        f"the step takes {step / exact:.2f} and {step / fast:.2f} times as long"
    ]
