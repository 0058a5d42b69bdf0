"""The record of `two_gpus.py`, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def summary(record: Mapping[str, Any]) -> list[str]:
    """What was found, by part; a part that has not run has no lines."""
    return [*_right(record), *_kit(record), *_engram(record), *_cost(record), *_step(record)]


def _right(record: Mapping[str, Any]) -> Iterator[str]:
    if "correct" in record:
        worst = max(record["correct"]["relative error"].values())
        yield f"experts behind comm operators: worst relative error {worst:.2g}, passed {record['correct']['passed']}"
    for name, row in record.get("modules", {}).get("errors", {}).items():
        errors, drift = max(row["experts"].values()), max(row["whole model, not judged"].values())
        equal = "equal" if row["engram rows equal"] else "DIFFER"
        yield f"modules, {name}: experts {errors:.2g}, Engram rows {equal}; whole model {drift:.2g} (not judged)"
    if "modules" in record:
        yield f"modules: passed {record['modules'].get('passed', 'unknown, cut off')}"
    for name, row in record.get("LLM", {}).items():
        yield f"LLM, {name} against one rank: {row}"


def _kit(record: Mapping[str, Any]) -> Iterator[str]:
    for title, kit in record.get("kit", {}).items():
        rows = kit["entries"]
        calls, worst = sum(row["calls"] for row in rows.values()), max(r["worst error / bound"] for r in rows.values())
        held = sum(row["status"] == "passed" for row in rows.values())
        yield f"{title}: {held} of {len(rows)} entries hold ({kit['of']} in all), {calls} calls, worst {worst:.2g}"
        for name, row in rows.items():
            if row["status"] != "passed":
                yield f"  {name} {row['status']}: {row['reason']}"


def _engram(record: Mapping[str, Any]) -> Iterator[str]:
    for name, row in record.get("engram", {}).items():
        time = f"{row['ms']:.3f} ms" if "ms" in row else "not timed"
        yield f"Engram rows, {name}: {time}, right {row['right']}, {row['bytes sent']} bytes"


def _cost(record: Mapping[str, Any]) -> Iterator[str]:
    for name, row in record.get("cost", {}).items():
        yield f"{name}: {', '.join(f'{call} {time:.3f} ms' for call, time in row['ms'].items())}"
        rates = ", ".join(f"{call} {rate:.0f}" for call, rate in row["GB/s out of a rank"].items())
        agree = {True: "; bytes as by formula", False: "; BYTES DIFFER"}
        bytes_agree = agree[row["bytes sent"] == row["bytes by formula"]] if "bytes by formula" in row else ""
        yield f"  GB/s: {rates}{bytes_agree}"


def _step(record: Mapping[str, Any]) -> Iterator[str]:
    times = {found["name"]: found["values"]["step"]["median"] for found in record.get("step", {}).get("records", ())}
    for name, time in times.items():
        alone = times.get(f"no network, {name.partition(', ')[2]}")
        if alone and alone != time:
            yield f"the network of {name}: {time - alone:+.2f} ms a step, {time / alone - 1:+.1%}"
    for found in record.get("step", {}).get("records", ()):
        step, problem = found["values"]["step"], found["problem"]
        memory = found["values"].get("peak_memory", {}).get("median", 0) / 2**30
        yield (
            f"{found['name']}, {problem['layers']} layers: {step['median']:.2f} ms ({step['low']:.2f} to "
            f"{step['high']:.2f}), peak {memory:.1f} GiB; a layer: {record['step']['a layer'].get(found['name'])}"
        )
        stages = sorted(found["stages"].items(), key=lambda item: -item[1])
        yield f"  {', '.join(f'{stage} {time:.2f}' for stage, time in stages)}"
