"""Comm operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import OperatorDeclaration, Properties, Tier, hookimpl

from minideepinfer_comm.options import GroupOptions, refuses_several

OPERATORS = (
    OperatorDeclaration(
        family="comm",
        name="single",
        summary="A world of one rank: tensors are passed through.",
        build="minideepinfer_comm.single:build",
        source="one rank of architecture section 3",
        tier=Tier.REFERENCE,
        priority=20,
        refuses=refuses_several,
        properties=Properties(deterministic=True, batch_invariant=True),
    ),
    OperatorDeclaration(
        family="comm",
        name="collective",
        summary="Gathers the tokens of all ranks, and scatters the sums back; NCCL or gloo.",
        build="minideepinfer_comm.collective:build",
        source="architecture section 3; torch.distributed",
        tier=Tier.OPTIMIZED,
        priority=10,
        properties=Properties(deterministic=True, batch_invariant=True),
        options=GroupOptions,
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
