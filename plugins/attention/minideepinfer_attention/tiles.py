"""How attention is cut into tiles."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
from minideepinfer.operators import interpreting
from minideepinfer.operators.problem import AttentionProblem
from torch import Tensor

LOG2E = math.log2(math.e)
"""Logits are kept in units of it."""
FORM = "triton, interpreted" if interpreting() else "triton"
PACKED = "released"
"""The cache layout whose entries kernels decode."""
GLUON_SIZES = (64, 512, 64, 128)
"""Heads, head_dim, rope_dim and window that the Gluon kernels are made for."""


def suits_gluon(problem: AttentionProblem) -> bool:
    """Whether the Gluon kernels serve a problem: the released sizes in bfloat16 on Hopper, not interpreted."""
    sizes = problem.num_heads, problem.head_dim, problem.rope_dim, problem.sliding_window
    hopper = problem.capability == (9, 0) and not interpreting()
    return hopper and sizes == GLUON_SIZES and problem.dtype == "bfloat16"


def head_tile(num_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Heads in a tile's M, padded width, keys in a tile, and the launch options that go with them.

    64 x 512 float32 sums fill half of the registers of an SM, so one such tile is what a program can hold. float32
    products are not done by tensor cores: their tiles are small, since every product is unrolled.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return {"BLOCK_H": 16, "BLOCK_D": block_d, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2}
    block_h = min(64, max(16, triton.next_power_of_2(num_heads)))
    warps = 8 if block_h * block_d > 64 * 128 else 4
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "BLOCK_K": 64, "num_warps": warps, "num_stages": 2}


@cache
def num_programs(device: torch.device) -> int:
    """Programs that fill a device, one for each multiprocessor; asked once, since `run` needs it."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def no_sink(num_heads: int, device: torch.device) -> Tensor:
    """Sinks that weigh nothing."""
    return torch.full((num_heads,), -torch.inf, device=device)
