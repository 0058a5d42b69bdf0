"""Comm operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import CommProblem, OperatorDeclaration, Properties, Tier, hookimpl


def _single_refuses(problem: CommProblem) -> list[str]:
    return [f"has world size {problem.world_size}, needs 1"] if problem.world_size > 1 else []


OPERATORS = (
    OperatorDeclaration(
        family="comm",
        name="single",
        summary="A world of one rank: tensors are passed through.",
        build="minideepinfer_comm.single:build",
        source="one rank of architecture section 3",
        tier=Tier.REFERENCE,
        refuses=_single_refuses,
        properties=Properties(deterministic=True, batch_invariant=True),
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
