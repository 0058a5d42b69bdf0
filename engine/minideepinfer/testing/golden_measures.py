"""Distances between what the engine computed and a golden tensor, and the cells they fill."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        sequence: e.g. `s101`.
        variant: e.g. `fp32-noq`.
        part: `modules` (golden inputs), `prefill`, `prefill+decode` or `bounded`.
        layer: block, None outside of blocks.
        module: column of the report.
        tensor: name in the golden file.
        measure: what `value` is: `rel L2`, `whole`, `median token`, `rows` (share of rows that choose otherwise),
            `1 - Jaccard` (mean over rows).
        value: the error.
        bound: the largest value that passes; None = reported only.
        rows: rows that stand out, if any: flipped codes, other choices.
        num_rows: rows compared.
    """

    sequence: str
    variant: str
    part: str
    layer: int | None
    module: str
    tensor: str
    measure: str
    value: float
    bound: float | None
    num_rows: int
    rows: tuple[int, ...] = field(default=())

    @property
    def failed(self) -> bool:
        """Past its bound, or not a finite number."""
        return not math.isfinite(self.value) or (self.bound is not None and not self.value <= self.bound)


def relative_l2(own: Tensor, golden: Tensor) -> float:
    """`|own - golden| / |golden|` over all elements; inf where golden is all zero and own is not."""
    own, golden = own.double(), golden.double()
    return _ratio((own - golden).norm(), golden.norm()).item()


def relative_l2_rows(own: Tensor, golden: Tensor) -> Tensor:
    """The same for each row: float64 `[N]`."""
    own, golden = own.double().flatten(1), golden.double().flatten(1)
    return _ratio((own - golden).norm(dim=1), golden.norm(dim=1))


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / size)


def as_mask(indices: Tensor, width: int) -> Tensor:
    """Each row's indices as a set: bool `[N, width]`; an index outside `0 .. width - 1` is nobody's.

    Args:
        indices: integer `[N, K]`.
        width: how many there are to choose from.
    """
    indices = indices.long()
    named = (indices >= 0) & (indices < width)
    mask = torch.zeros(len(indices), width + 1, dtype=torch.bool)
    return mask.scatter_(1, indices.where(named, width), True)[:, :-1]


def differing_rows(own: Tensor, golden: Tensor) -> Tensor:
    """Rows whose sets differ: bool `[N]`, of bool `[N, W]` masks."""
    return (own != golden).any(1)


def jaccard_distance(own: Tensor, golden: Tensor) -> float:
    """Mean of `1 - |both| / |either|` over rows, of bool `[N, W]` masks; two empty sets are equal."""
    both, either = (own & golden).sum(1).double(), (own | golden).sum(1).double()
    return float((1 - torch.where(either > 0, both / either, 1.0)).mean())
