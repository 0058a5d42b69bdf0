"""What `bench kernel` times: one module per operator family, with a `KernelFamily` as FAMILY."""

from __future__ import annotations

import importlib

from minideepinfer.measure.kernels.contract import KernelFamily

PRESETS = ("v41-rank", "decode", "tiny")


def kernel_family(name: str) -> KernelFamily:
    """What is known of a family."""
    found: KernelFamily = importlib.import_module(f"minideepinfer.measure.kernels.{name}").FAMILY
    return found
