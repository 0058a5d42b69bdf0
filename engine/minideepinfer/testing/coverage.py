"""How much an operator refuses: of the problems that the kit draws, and of those that models have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from minideepinfer.checkpoint.make_tiny import DEFAULT_CONFIG
from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.operators import Problem, RegisteredOperator
from minideepinfer.operators.resolve import OWN_DISTRIBUTION
from minideepinfer.operators.support import obstacles
from minideepinfer.runtime.problems import layer_problems

MOST_REFUSED = 0.2
"""Share of drawn problems that a built-in operator may refuse."""

PRECISIONS = (("none", "none"), ("released", "none"), ("released", "released"))
"""Quantisation of cached values and of activations, as models are run."""


def is_built_in(operator: RegisteredOperator) -> bool:
    """Whether it comes with this engine."""
    return operator.distribution == OWN_DISTRIBUTION


def declines(operator: RegisteredOperator, problem: Problem) -> bool:
    """Whether it refuses a problem of a phase that it declares."""
    declaration = operator.declaration
    return problem.phase in declaration.support.phases and bool(obstacles(declaration, problem))


def packaged_configs() -> list[ModelConfig]:
    """The models that this package carries: the trained one, and what `make-tiny` makes."""
    return [ModelConfig.from_file(directory_of("tiny")), ModelConfig.from_file(DEFAULT_CONFIG)]


def uncovered(
    operator: RegisteredOperator,
    configs: Iterable[ModelConfig],
    device: str = "cpu",
    capability: tuple[int, int] | None = None,
) -> list[str]:
    """What an operator refuses of some models, in the dtypes and phases that it declares.

    Args:
        operator: the operator.
        configs: the models.
        device: device type.
        capability: CUDA compute capability.

    Returns:
        One sentence for each layer, phase and dtype; empty if it serves all.
    """
    found: dict[str, None] = {}
    for config in configs:
        for place, problem in _problems(operator, config, device, capability):
            if declines(operator, problem):
                found[f"{place}: {'; '.join(obstacles(operator.declaration, problem))}"] = None
    return list(found)


def _problems(
    operator: RegisteredOperator, config: ModelConfig, device: str, capability: tuple[int, int] | None
) -> Iterator[tuple[str, Problem]]:
    for dtype in operator.declaration.support.dtypes:
        for kv, activation in PRECISIONS:
            engine = EngineConfig(dtype=dtype, kv_quantization=kv, activation_quantization=activation)
            for (family, layer, phase), problem in layer_problems(config, engine, device, capability).items():
                if family == operator.declaration.family:
                    yield f"{'engine' if layer is None else f'layer {layer}'}, {phase}, {dtype}", problem
