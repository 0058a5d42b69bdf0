"""Comm operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import OperatorDeclaration, Properties, Support, Tier, hookimpl

from minideepinfer_comm.options import GroupOptions, refuses_several, refuses_uneven

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
    OperatorDeclaration(
        family="comm",
        name="all_to_all",
        summary="Sends a token only to the ranks that own one of its experts; NCCL or gloo.",
        build="minideepinfer_comm.all_to_all:build",
        source="architecture section 3; torch.distributed",
        tier=Tier.OPTIMIZED,
        priority=5,
        refuses=refuses_uneven,
        properties=Properties(deterministic=True, batch_invariant=True),
        options=GroupOptions,
    ),
    OperatorDeclaration(
        family="comm",
        name="symmetric",
        summary="As collective, but table rows are read straight from the memory of the GPU that has them.",
        build="minideepinfer_comm.symmetric:build",
        source="torch symmetric memory",
        tier=Tier.EXPERIMENTAL,
        support=Support(devices=("cuda",), requires=("triton",)),
        properties=Properties(deterministic=True, batch_invariant=True),
        options=GroupOptions,
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
