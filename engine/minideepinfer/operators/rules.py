"""The operator choices of an `EngineConfig`, flattened: most specific first, each with its config path."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from minideepinfer.config import Choice, OperatorChoice, OperatorRule, PhaseChoice
from minideepinfer.errors import ConfigError
from minideepinfer.operators.declaration import Phase

AUTO = "auto"
"""The name that asks for an automatic choice."""


@dataclass(frozen=True)
class Rule:
    """One choice somebody made.

    Attributes:
        path: where it stands in the config, e.g. `ops.attention.layers["0-2"].decode`.
        name: operator name, or `auto`.
        options: the operator's options as written.
        layers: layers it holds for, None = all.
        phase: phase it holds for, None = both.
    """

    path: str
    name: str = AUTO
    options: dict[str, Any] = field(default_factory=dict)
    layers: range | None = None
    phase: Phase | None = None

    def applies(self, layer: int | None, phase: Phase) -> bool:
        """Whether it speaks about this layer and phase."""
        return (self.layers is None or layer in self.layers) and self.phase in (None, phase)


def family_rules(
    family: str, setting: str | OperatorChoice | OperatorRule | None, layers: Collection[int], num_layers: int
) -> list[Rule]:
    """Flatten the setting of one family.

    Args:
        family: operator family.
        setting: what `EngineConfig.ops` says about it, None = nothing.
        layers: layers that have an operator of this family; empty if it is not chosen by layer.
        num_layers: layers of the model.

    Returns:
        Rules, most specific first; the last one holds for every layer and phase.

    Raises:
        ConfigError: layer keys are malformed, out of range, overlap, or name no layer with such an operator.
    """
    path = f"ops.{family}"
    if not isinstance(setting, OperatorRule):
        return [_rule(path, AUTO if setting is None else setting)]
    parsed = {key: _layers(f'{path}.layers["{key}"]', key, num_layers) for key in setting.layers}
    _refuse_overlaps(f"{path}.layers", parsed)
    rules = []
    for key, choice in setting.layers.items():
        place = f'{path}.layers["{key}"]'
        if not any(layer in parsed[key] for layer in layers):
            known = ", ".join(map(str, sorted(layers))) or "none"
            raise ConfigError(f"{place}: no layer there has an operator of family {family}; layers that do: {known}")
        rules += _by_phase(place, choice, parsed[key])
    rules += [*_by_phase(path, setting, None), _rule(f"{path}.default", setting.default)]
    return sorted(rules, key=lambda rule: (rule.layers is None, rule.phase is None))


def _by_phase(path: str, choice: Choice | PhaseChoice, layers: range | None) -> list[Rule]:
    if not isinstance(choice, PhaseChoice):
        return [_rule(path, choice, layers)]
    phases = ((Phase.PREFILL, choice.prefill), (Phase.DECODE, choice.decode))
    return [_rule(f"{path}.{phase}", named, layers, phase) for phase, named in phases if named is not None]


def _rule(path: str, choice: Choice, layers: range | None = None, phase: Phase | None = None) -> Rule:
    if isinstance(choice, str):
        return Rule(path, choice, {}, layers, phase)
    if choice.name == AUTO and choice.options:
        raise ConfigError(f"{path}: gives options {sorted(choice.options)} to auto; options need an operator's name")
    return Rule(path, choice.name, choice.options, layers, phase)


def _layers(path: str, key: str, num_layers: int) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", key, re.ASCII)
    if match is None:
        raise ConfigError(f'{path}: is not a layer like "3" or an inclusive range like "0-2"')
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ConfigError(f'{path}: runs backwards; write "{last}-{first}"')
    if last >= num_layers:
        raise ConfigError(f"{path}: names layer {last}, but the model has layers 0-{num_layers - 1}")
    return range(first, last + 1)


def _refuse_overlaps(path: str, parsed: dict[str, range]) -> None:
    ordered = sorted(parsed.items(), key=lambda item: item[1].start)
    for (key, layers), (next_key, next_layers) in pairwise(ordered):
        if next_layers.start < layers.stop:
            raise ConfigError(f'{path}: "{key}" and "{next_key}" both name layer {next_layers.start}; name it once')
