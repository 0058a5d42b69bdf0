"""What a call costs at least: arithmetic and bytes, from which its floor follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ARITHMETICS = ("fp8", "bf16", "float32")
"""Arithmetics whose rates are measured, the narrowest first."""


@dataclass(frozen=True)
class Cost:
    """Arithmetic and memory traffic of a call.

    A built operator may have a method `cost(call, least) -> Cost`: it is given the call (with its `problem`) and the
    least that its family's problem costs, and says what its own way costs, e.g. `least.at("fp8")` if it multiplies in
    fp8. Without one, the least stands.

    Attributes:
        flops: operations by arithmetic (`ARITHMETICS`), two for a multiply-add.
        num_bytes: bytes read and written.
    """

    flops: Mapping[str, int]
    num_bytes: int

    @property
    def total_flops(self) -> int:
        """Operations of all arithmetics."""
        return sum(self.flops.values())

    def at(self, arithmetic: str) -> Cost:
        """The same, with all operations in one arithmetic."""
        return Cost({arithmetic: self.total_flops}, self.num_bytes)

    def __add__(self, other: Cost) -> Cost:
        flops = {name: self.flops.get(name, 0) + other.flops.get(name, 0) for name in {**self.flops, **other.flops}}
        return Cost(flops, self.num_bytes + other.num_bytes)
