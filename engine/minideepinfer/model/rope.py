"""Rotary position embedding: adjacent pairs in the last channels, YaRN on frequencies only (spec 3.4)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from minideepinfer.config.model import RopeScaling, TextConfig


class Angles(NamedTuple):
    """Cosine and sine of every position's angles, float32 `[T, C]` each."""

    cos: Tensor
    sin: Tensor


class RotaryTable:
    """The frequencies of one kind of layer; q, window, global and index vectors of a layer share them."""

    def __init__(self, frequencies: Tensor) -> None:
        """Take float32 `[C]` frequencies in radians per position, C = rope_dim / 2."""
        self.frequencies = frequencies

    @classmethod
    def for_ratio(cls, config: TextConfig, compress_ratio: int, device: torch.device | str = "cpu") -> RotaryTable:
        """Derive the frequencies of a layer.

        Args:
            config: facts of the model.
            compress_ratio: of the layer. 0 uses `rope_theta` alone; else `compress_rope_theta` with YaRN.
            device: where `angles` works.
        """
        dim = config.qk_rope_head_dim
        if compress_ratio == 0:
            frequencies = _base_frequencies(dim, config.rope_theta)
        else:
            theta = config.compress_rope_theta
            frequencies = _yarn(_base_frequencies(dim, theta), dim, theta, config.rope_scaling)
        return cls(frequencies.to(device, torch.float32))

    def angles(self, positions: Tensor) -> Angles:
        """Cosine and sine of `position * frequency`, all in float32.

        Args:
            positions: integer `[T]`.
        """
        radians = positions.float().unsqueeze(-1) * self.frequencies
        return Angles(radians.cos(), radians.sin())


def yarn_range(dim: int, theta: float, scaling: RopeScaling) -> tuple[int, int]:
    """Pairs below `low` keep their frequency, pairs from `high` on have it divided by the factor (released: 15, 25)."""

    def pair(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), dim - 1)


def _base_frequencies(dim: int, theta: float) -> Tensor:
    # float64 rounded once: the same float32 numbers on every machine.
    return torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def _yarn(frequencies: Tensor, dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    low, high = yarn_range(dim, theta, scaling)
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last 2C channels, pair (2i, 2i + 1) by angle i, in float32, rounded once to x's dtype.

    Args:
        x: `[T, D]` or `[T, H, D]`; not modified.
        cos: float32 `[T, C]`.
        sin: float32 `[T, C]`.

    Returns:
        Same shape and dtype as x.
    """
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    start = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., start::2].float(), x[..., start + 1 :: 2].float()
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :start], rotated.to(x.dtype)], dim=-1)


def undo_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate back by the same angles; the inverse of `apply_rope` up to rounding."""
    return apply_rope(x, cos, -sin)
