"""The outcome of choosing: which operator serves which layer and phase, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minideepinfer.operators.declaration import OperatorOptions, Phase
from minideepinfer.operators.problem import Problem
from minideepinfer.operators.registry import RegisteredOperator

PlanKey = tuple[str, int | None, Phase]
"""Family, layer (None where a family is not chosen by layer), phase."""


@dataclass(frozen=True, eq=False)
class PlannedOperator:
    """One choice.

    Attributes:
        registered: the operator chosen, and where it comes from.
        options: its options, validated.
        problem: what it will serve.
        reason: `explicit: <config path>` or `auto: ...`.
        rejected: the family's other operators by name, each with the reasons why it was not taken.
    """

    registered: RegisteredOperator
    options: OperatorOptions
    problem: Problem
    reason: str
    rejected: Mapping[str, tuple[str, ...]]

    @property
    def title(self) -> str:
        """Operator, origin, options and reason on one line."""
        operator, options = self.registered, self.options.model_dump(mode="json")
        written = "".join(f" {name}={value}" for name, value in options.items())
        return f"{operator.name}{written} ({operator.distribution} {operator.version})  {self.reason}"


@dataclass(frozen=True, eq=False)
class Plan:
    """All choices of a run.

    Attributes:
        operators: by family, layer and phase; families in the order of `FAMILIES`, layers ascending.
    """

    operators: Mapping[PlanKey, PlannedOperator]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for records: one entry for each family, layer and phase under `operators`."""
        return {"operators": [_entry(key, planned) for key, planned in self.operators.items()]}

    def lines(self) -> list[str]:
        """Text for a log; layers and phases with the same choice share a line."""
        return _merged((key, planned.title) for key, planned in self.operators.items())

    def rejection_lines(self) -> list[str]:
        """Text like `lines` for the operators that were not taken, with the reasons."""
        return _merged(
            (key, f"not {name}: {'; '.join(reasons)}")
            for key, planned in self.operators.items()
            for name, reasons in planned.rejected.items()
        )


def _merged(texts: Iterable[tuple[PlanKey, str]]) -> list[str]:
    """Aligned lines `family layers phases text`, one for all layers and phases with the same text."""
    phases: dict[tuple[str, str, int | None], list[Phase]] = {}
    for (family, layer, phase), text in texts:
        phases.setdefault((family, text, layer), []).append(phase)
    layers: dict[tuple[str, str, str], list[int | None]] = {}
    for (family, text, layer), served in phases.items():
        layers.setdefault((family, text, "+".join(served)), []).append(layer)
    rows = [(family, _ranges(where), served, text) for (family, text, served), where in layers.items()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]


def _entry(key: PlanKey, planned: PlannedOperator) -> dict[str, Any]:
    family, layer, phase = key
    return {
        "family": family,
        "layer": layer,
        "phase": phase.value,
        "operator": planned.registered.name,
        "distribution": planned.registered.distribution,
        "version": planned.registered.version,
        "options": planned.options.model_dump(mode="json"),
        "reason": planned.reason,
        "rejected": {name: list(reasons) for name, reasons in planned.rejected.items()},
    }


def _ranges(layers: Iterable[int | None]) -> str:
    """`layers 0-2,5`, or `engine` for what is not chosen by layer."""
    runs: list[list[int]] = []
    for layer in layers:
        if layer is None:
            return "engine"
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "layers " + ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)
