"""The operator contract: what a plugin declares, what its operators are called with, what they guarantee.

Nothing here imports torch. A plugin needs `hookimpl`, `OperatorDeclaration` and the protocol of its family.
"""

from minideepinfer.operators.attention import AttentionOperator
from minideepinfer.operators.batch import Batch
from minideepinfer.operators.comm import CommOperator, Dispatched
from minideepinfer.operators.context import BuildContext, NoClock, StageClock
from minideepinfer.operators.declaration import (
    CONTRACT_VERSION,
    OperatorDeclaration,
    OperatorOptions,
    Phase,
    Properties,
    Support,
    Tier,
)
from minideepinfer.operators.hookspecs import ENTRY_POINT_GROUP, hookimpl
from minideepinfer.operators.indexer import IndexerOperator
from minideepinfer.operators.moe import MoeOperator, MoeWeights, PackedExperts, SharedExpert
from minideepinfer.operators.problem import AttentionProblem, CommProblem, IndexerProblem, MoeProblem, Problem
from minideepinfer.operators.selection import TOKEN_INDICES, IndexerOutput, Selection

FAMILIES: tuple[str, ...] = ("attention", "indexer", "moe", "comm")
"""Operator families, in the order in which reports list them."""

__all__ = [
    "CONTRACT_VERSION",
    "ENTRY_POINT_GROUP",
    "FAMILIES",
    "TOKEN_INDICES",
    "AttentionOperator",
    "AttentionProblem",
    "Batch",
    "BuildContext",
    "CommOperator",
    "CommProblem",
    "Dispatched",
    "IndexerOperator",
    "IndexerOutput",
    "IndexerProblem",
    "MoeOperator",
    "MoeProblem",
    "MoeWeights",
    "NoClock",
    "OperatorDeclaration",
    "OperatorOptions",
    "PackedExperts",
    "Phase",
    "Problem",
    "Properties",
    "Selection",
    "SharedExpert",
    "StageClock",
    "Support",
    "Tier",
    "hookimpl",
]
