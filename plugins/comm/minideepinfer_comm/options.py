"""Options of the operators between processes, and what they refuse; needs no torch."""

from __future__ import annotations

from minideepinfer.operators import CommProblem, OperatorOptions
from pydantic import Field


class GroupOptions(OperatorOptions):
    """Options of the operators between processes.

    Attributes:
        timeout_seconds: how long a rank waits for the others before it gives up; of a process group that the operator
            makes itself.
    """

    timeout_seconds: float = Field(default=30.0, gt=0.0)


def refuses_several(problem: CommProblem) -> list[str]:
    """What `single` can't serve."""
    return [f"has world size {problem.world_size}, needs 1"] if problem.world_size > 1 else []


def refuses_uneven(problem: CommProblem) -> list[str]:
    """What operators that know experts by their owner can't serve."""
    if problem.num_experts % problem.world_size == 0:
        return []
    return [f"has {problem.num_experts} experts on {problem.world_size} ranks, needs as many on each"]
