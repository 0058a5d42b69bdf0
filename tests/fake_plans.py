"""Plans for the packaged model from operators that are only declared."""

from __future__ import annotations

from typing import Any

from fake_plugins import declaration
from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.operators import (
    FAMILIES,
    OperatorDeclaration,
    OperatorOptions,
    OperatorRegistry,
    Phase,
    Plan,
    Problem,
    RegisteredOperator,
    Tier,
    resolve,
)
from minideepinfer.runtime.problems import layer_problems
from pydantic import Field

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
TINY = ModelConfig.from_file(directory_of("tiny"))


class TileOptions(OperatorOptions):
    tile: int = Field(4, ge=1)


def registered(item: OperatorDeclaration, distribution: str = "mini-deepinfer") -> RegisteredOperator:
    return RegisteredOperator(item, distribution, "9.9", "ops")


def registry(*operators: RegisteredOperator) -> OperatorRegistry:
    """Operators beside the plainest possible one of each family."""
    plain = [registered(declaration("plain", family, tier=Tier.REFERENCE)) for family in FAMILIES]
    return OperatorRegistry([*plain, *operators])


def problems(
    config: EngineConfig, device: str = "cpu", capability: tuple[int, int] | None = None
) -> dict[Any, Problem]:
    return layer_problems(TINY, config, device, capability)


def plan_of(ops: dict[str, Any], *operators: RegisteredOperator) -> Plan:
    config = EngineConfig(ops=ops)
    return resolve(registry(*operators), config, problems(config))


def names(plan: Plan, family: str, phase: Phase = PREFILL) -> list[str]:
    return [item.registered.name for (other, _, at), item in plan.operators.items() if (other, at) == (family, phase)]
