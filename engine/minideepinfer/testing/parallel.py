"""Checking several operators, in this process or in some at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from minideepinfer.operators import OperatorRegistry, RegisteredOperator, load_registry
from minideepinfer.testing.checking import Report, check_operator
from minideepinfer.testing.search import PROFILES


def check_operators(
    operators: list[RegisteredOperator],
    registry: OperatorRegistry,
    profile: str,
    seed: int = 0,
    device: str = "cpu",
    jobs: int = 1,
) -> Iterator[Report]:
    """Check operators one after the other, or some at once in processes of their own; reports in the order given.

    Args:
        operators: what to check.
        registry: where they come from; a process of its own loads what is installed.
        profile: name of a profile.
        seed: see `check_operator`.
        device: see `check_operator`.
        jobs: processes; 1 = this one.
    """
    if jobs == 1:
        yield from (check_operator(each, registry, PROFILES[profile], seed, device) for each in operators)
        return
    context = multiprocessing.get_context("spawn")  # forked processes cannot use CUDA
    with ProcessPoolExecutor(jobs, context) as pool:
        names = [(operator.declaration.family, operator.name) for operator in operators]
        yield from pool.map(_check_installed, names, repeat(profile), repeat(seed), repeat(device))


def _check_installed(name: tuple[str, str], profile: str, seed: int, device: str) -> Report:
    registry = load_registry()
    return check_operator(registry.get(*name), registry, PROFILES[profile], seed, device)
