"""Ranks compare, before they read weights, what must be the same on all of them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from minideepinfer.checkpoint import Checkpoint
from minideepinfer.config import EngineConfig
from minideepinfer.errors import RankError
from minideepinfer.operators import Phase
from minideepinfer.operators.plan import Plan
from minideepinfer.runtime.problems import device_capability
from minideepinfer.runtime.world import World

LIBRARIES = ("mini-deepinfer", "torch", "triton", "numpy", "tokenizers")
"""Distributions whose versions must be equal."""

MAX_DIFFERENCES = 5
"""Differences that one error spells out; the rest are counted."""


def facts(config: EngineConfig, checkpoint: Checkpoint, plan: Plan, device: torch.device) -> dict[str, Any]:
    """What must be the same on all ranks, flat: settings, versions, device, checkpoint, plan of operators."""
    libraries = {f"version of {name}": _version(name) for name in LIBRARIES}
    return {
        "version of Python": platform.python_version(),
        **libraries,
        "device": (device.type, device_capability(device)),
        **dict(_flat("config", config.model_dump())),
        "fingerprint of the checkpoint": checkpoint.fingerprint(),
        **{f"operator of {_place(*key)}": planned.title for key, planned in plan.operators.items()},
    }


def agree(world: World, own: dict[str, Any]) -> None:
    """Compare the facts of all ranks.

    Raises:
        RankError: on every rank, what differs from rank 0, and where.
    """
    first, *others = world.exchange(own)
    found = [
        f"{name} is {theirs.get(name)!r} on rank {rank} and {first.get(name)!r} on rank 0"
        for rank, theirs in enumerate(others, start=1)
        for name in sorted({*first, *theirs})
        if theirs.get(name) != first.get(name)
    ]
    if found:
        more = f"; and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
        raise RankError(f"ranks differ: {'; '.join(found[:MAX_DIFFERENCES])}{more}; all must be started alike")


def _place(family: str, layer: int | None, phase: Phase) -> str:
    return f"{family}, {phase}" if layer is None else f"{family}, layer {layer}, {phase}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, value
