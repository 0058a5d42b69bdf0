"""Which part of the experts and of a table's rows a rank holds. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from minideepinfer.errors import ConfigError


@dataclass(frozen=True)
class Partition:
    """One rank's place among those that share experts and Engram tables, in contiguous parts, rank 0 first.

    Attributes:
        rank: this one.
        size: ranks in all.
    """

    rank: int = 0
    size: int = 1

    def experts(self, num_experts: int) -> range:
        """This rank's routed experts; every rank has as many.

        Raises:
            ConfigError: they cannot be divided evenly.
        """
        check_experts(num_experts, self.size)
        each = num_experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def rows(self, num_rows: int) -> range:
        """This rank's rows of a table; the last ranks may have fewer than the others, or none."""
        each = self.rows_per_rank(num_rows)
        return range(min(self.rank * each, num_rows), min((self.rank + 1) * each, num_rows))

    def rows_per_rank(self, num_rows: int) -> int:
        """Rows of a full part: row i lies on rank `i // rows_per_rank`."""
        return max(1, -(-num_rows // self.size))


def check_experts(num_experts: int, ranks: int) -> None:
    """Refuse a number of ranks that cannot share the experts evenly.

    Raises:
        ConfigError: says which numbers can.
    """
    if num_experts % ranks:
        fits = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        raise ConfigError(
            f"parallel.expert: {num_experts} routed experts cannot be divided evenly among {ranks} ranks; "
            f"what would fit: {fits}"
        )
