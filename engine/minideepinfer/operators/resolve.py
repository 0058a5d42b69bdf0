"""Choosing the operator of every layer and phase: by name as configured, or by `auto`; never by trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from minideepinfer.config import EngineConfig
from minideepinfer.config.model import describe
from minideepinfer.errors import ConfigError, OperatorError
from minideepinfer.operators.declaration import OperatorOptions, Tier
from minideepinfer.operators.families import FAMILIES
from minideepinfer.operators.plan import Plan, PlanKey, PlannedOperator
from minideepinfer.operators.problem import AttentionProblem, IndexerProblem, Problem
from minideepinfer.operators.registry import OperatorRegistry, RegisteredOperator
from minideepinfer.operators.rules import AUTO, Rule, family_rules
from minideepinfer.operators.support import obstacles

OWN_DISTRIBUTION = "mini-deepinfer"
"""The only distribution that `auto` ranks: installing another one never changes a running system's numbers."""

Reasons = dict[str, tuple[str, ...]]
"""Operator name -> why it cannot serve; empty if it can."""


def resolve(registry: OperatorRegistry, engine_config: EngineConfig, problems: Mapping[PlanKey, Problem]) -> Plan:
    """Choose an operator for every problem.

    Indexers are chosen first. An explicitly chosen indexer that emits another selection layout than its problem asks
    for sets the layout of the attention layers that use its selection.

    Args:
        registry: what is there to choose from.
        engine_config: its `ops` hold the choices.
        problems: by family, layer and phase, of all layers of the model.

    Returns:
        The plan; its problems carry the selection layouts that are really passed on.

    Raises:
        ConfigError: `ops` names an unknown family, a wrong layer key, or a wrong option.
        OperatorError: an operator is unknown or cannot serve; or `auto` finds none.
    """
    rules = _rules(registry, engine_config, problems)
    chosen: dict[PlanKey, PlannedOperator] = {}
    for key in sorted(problems, key=lambda key: key[0] != "indexer"):
        family, layer, phase = key
        rule = next(rule for rule in rules[family] if rule.applies(layer, phase))
        choice = _Choice(registry, rule, key, *_passed_on(problems[key], key, chosen))
        chosen[key] = choice.automatic() if rule.name == AUTO else choice.explicit()
    return Plan({key: chosen[key] for key in sorted(chosen, key=_reading_order)})


@dataclass(frozen=True)
class _Choice:
    """One decision; `note` ends the message of a refusal."""

    registry: OperatorRegistry
    rule: Rule
    key: PlanKey
    problem: Problem
    note: str

    def explicit(self) -> PlannedOperator:
        operator = self.registry.get(self.key[0], self.rule.name)
        problem = _in_emitted_layout(self.problem, operator)
        reasons = self._reasons(problem)
        if why := reasons.pop(operator.name):
            usable = [name for name, obstacle in reasons.items() if not obstacle]
            raise OperatorError(
                f"{self.rule.path}: {operator.title} cannot serve {_place(self.key)}: {'; '.join(why)}. "
                f"What works here: {', '.join(usable) or 'nothing that is installed'}{self.note}"
            )
        rejected = {name: why or (f"{self.rule.path} names {operator.name}",) for name, why in reasons.items()}
        return self._planned(operator, problem, f"explicit: {self.rule.path}", rejected)

    def automatic(self) -> PlannedOperator:
        reasons = self._reasons(self.problem)
        operators = self.registry.operators(self.key[0])
        unranked = {
            operator.name: reasons[operator.name] or _never_ranked(operator, self.problem) for operator in operators
        }
        ranked = [operator for operator in operators if not unranked[operator.name]]
        if not ranked:
            listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in unranked.items()) or "none is registered"
            usable = [name for name, why in reasons.items() if not why]
            hint = f". By name these would work: {', '.join(usable)}" if usable else ""
            raise OperatorError(
                f"{self.rule.path}: auto finds no operator for {_place(self.key)}: {listed}{hint}{self.note}"
            )
        best = min(ranked, key=lambda operator: (-operator.declaration.priority, operator.name))
        top = best.declaration.priority
        rejected = {
            operator.name: unranked[operator.name] or (_outranked(operator, best),)
            for operator in operators
            if operator is not best
        }
        reason = f"auto: highest priority ({top}) of {len(ranked)} from {OWN_DISTRIBUTION} that can serve"
        return self._planned(best, self.problem, reason, rejected)

    def _reasons(self, problem: Problem) -> Reasons:
        operators = self.registry.operators(self.key[0])
        return {operator.name: obstacles(operator.declaration, problem) for operator in operators}

    def _planned(
        self, operator: RegisteredOperator, problem: Problem, reason: str, rejected: Reasons
    ) -> PlannedOperator:
        return PlannedOperator(operator, _options(operator, self.rule), problem, reason, rejected)


def _rules(
    registry: OperatorRegistry, engine_config: EngineConfig, problems: Mapping[PlanKey, Problem]
) -> dict[str, list[Rule]]:
    """The rules of every family, each checked whether or not a layer comes to use it."""
    if unknown := sorted(set(engine_config.ops) - set(FAMILIES)):
        raise ConfigError(f"ops.{unknown[0]}: is no operator family; families are {', '.join(FAMILIES)}")
    num_layers = 1 + max((layer for _, layer, _ in problems if layer is not None), default=-1)
    rules = {}
    for family in FAMILIES:
        layers = {layer for other, layer, _ in problems if other == family and layer is not None}
        rules[family] = family_rules(family, engine_config.ops.get(family), layers, num_layers)
        for rule in rules[family]:
            if rule.name != AUTO:
                _options(_named(registry, family, rule), rule)
    return rules


def _named(registry: OperatorRegistry, family: str, rule: Rule) -> RegisteredOperator:
    try:
        return registry.get(family, rule.name)
    except OperatorError as error:
        raise OperatorError(f"{rule.path}: {error}") from None


def _options(operator: RegisteredOperator, rule: Rule) -> OperatorOptions:
    model = operator.declaration.options
    try:
        return model.model_validate(rule.options)
    except ValidationError as error:
        known = ", ".join(model.model_fields) or "none"
        message = f"{rule.path}.options: {describe(error)}; {operator.title} has these options: {known}"
        raise ConfigError(message) from None


def _passed_on(problem: Problem, key: PlanKey, chosen: Mapping[PlanKey, PlannedOperator]) -> tuple[Problem, str]:
    """The problem in the selection layout of its index source (spec section 0), with a note if that changed it."""
    _, layer, phase = key
    if not isinstance(problem, AttentionProblem) or not problem.compress_ratio or layer is None:
        return problem, ""
    sources = [source for source in range(layer + 1) if ("indexer", source, phase) in chosen]
    if not sources:
        return problem, ""
    indexer = chosen["indexer", sources[-1], phase]
    assert isinstance(indexer.problem, IndexerProblem)
    layout = indexer.problem.selection_layout
    if layout == problem.selection_layout:
        return problem, ""
    note = f". The selection layout {layout} is that of {indexer.registered.title} in layer {sources[-1]}"
    return replace(problem, selection_layout=layout), note


def _in_emitted_layout(problem: Problem, operator: RegisteredOperator) -> Problem:
    """The problem of an indexer, asking for a layout that the operator emits."""
    emitted = operator.declaration.emits.get("selection", ())
    if not isinstance(problem, IndexerProblem) or not emitted or problem.selection_layout in emitted:
        return problem
    return replace(problem, selection_layout=emitted[0])


def _never_ranked(operator: RegisteredOperator, problem: Problem) -> tuple[str, ...]:
    reasons = []
    if operator.distribution != OWN_DISTRIBUTION:
        reasons.append(f"comes from {operator.distribution}, auto ranks only {OWN_DISTRIBUTION}")
    if operator.declaration.tier is Tier.EXPERIMENTAL:
        reasons.append("is experimental, auto never picks that")
    if problem.device not in operator.declaration.support.devices:
        reasons.append(f"would be interpreted on {problem.device}, auto never picks that")
    return tuple(reasons)


def _outranked(operator: RegisteredOperator, best: RegisteredOperator) -> str:
    has, top = operator.declaration.priority, best.declaration.priority
    if has < top:
        return f"has priority {has}, {best.name} has {top}"
    return f"has priority {has} like {best.name}, which is first by name"


def _place(key: PlanKey) -> str:
    _, layer, phase = key
    return f"layer {layer}, {phase}" if layer is not None else f"{phase}"


def _reading_order(key: PlanKey) -> tuple[int, int, bool]:
    family, layer, phase = key
    return FAMILIES.index(family), -1 if layer is None else layer, phase == "decode"
