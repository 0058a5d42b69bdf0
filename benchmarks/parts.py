"""What the scripts beside it share: parts of one operator, on problems of `bench kernel`, timed in turn on one GPU.

`bench kernel` times operators whole, beside naive and the floor, and checks them. A script adds what only the
operator's own functions can give: its launches one by one, and what bounds them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from minideepinfer.measure.facts import MachineWatch, software
from minideepinfer.measure.floor import floor_ms
from minideepinfer.measure.kernels import kernel_family
from minideepinfer.measure.kernels.records import plain_data
from minideepinfer.measure.rates import measured_rates
from minideepinfer.measure.record import Record, require_writable, write_records
from minideepinfer.measure.timing import Call, time_calls
from minideepinfer.operators import BuildContext, Cost, OperatorOptions

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Parts:
    """What is timed in turn.

    Attributes:
        name: of the record.
        recipe: the sizes, as `bench kernel` has them.
        calls: by name.
        costs: the least of some of the calls.
        errors: what else was found, by name.
    """

    name: str
    recipe: Any
    calls: Mapping[str, Call]
    costs: Mapping[str, Cost] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


def case_of(family: str, preset: str, problem: str, **changes: Any) -> tuple[Any, Any]:
    """The recipe of a problem of `bench kernel`, changed, and its case on the GPU."""
    known = kernel_family(family)
    recipe = replace(known.problems[preset][problem][1], **changes)
    return recipe, known.make(recipe, DEVICE)


def built(module: Any, problem: Any) -> Any:
    """A plugin's operator at its default options."""
    return module.build(BuildContext(problem, OperatorOptions(), DEVICE))


def run(family: str, doc: str, parts: Callable[[], Iterator[Parts]]) -> None:
    """Measure, print and, if asked, keep what a script yields."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="FILE", help="write the records there, as JSON")
    output = parser.parse_args().output
    if output:
        require_writable(output)
    torch.manual_seed(0)
    begin, watch, used, rates, records = (
        time.perf_counter(),
        MachineWatch(DEVICE),
        software(),
        measured_rates(DEVICE),
        [],
    )
    for part in parts():
        times = time_calls(part.calls, DEVICE, repeats=20, warmup=2, seconds=0.3)
        floors = {name: floor_ms(cost, rates) for name, cost in part.costs.items()}
        print(f"{family}, {part.name} ({time.perf_counter() - begin:.1f} s)", *part.errors.items())
        for name, found in times.items():
            times_floor = f"{found.median / floors[name]:8.2f} x floor" if name in floors else ""
            print(f"{found.median:10.4f} ms ({found.low:.4f} to {found.high:.4f}) {name:40}{times_floor}", flush=True)
        record = Record(
            benchmark="parts",
            name=f"{family}, {part.name}",
            headline=f"parts of {family}:fused alone, made-up numbers; {part.name}",
            machine=watch.machine(),
            software=used,
            problem={"sizes": plain_data(part.recipe)},
            seed=0,
            values=times,
            floors=floors,
            rates=rates,
            errors=dict(part.errors),
        )
        records.append(record)
        if output:
            write_records(output, records)
