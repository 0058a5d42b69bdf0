"""The operator contract: what a plugin declares, what its operators are called with, what they guarantee.

Nothing here imports torch. A plugin needs `hookimpl`, `OperatorDeclaration` and the protocol of its family.
"""

from minideepinfer.operators.attention import AttentionOperator
from minideepinfer.operators.batch import Batch
from minideepinfer.operators.build import OperatorBuilder, build
from minideepinfer.operators.comm import Arrived, CommOperator, Dispatched, Pending, TokenExchange
from minideepinfer.operators.context import BuildContext, NoClock, Stage, StageClock
from minideepinfer.operators.cost import Cost
from minideepinfer.operators.declaration import (
    CONTRACT_VERSION,
    OperatorDeclaration,
    OperatorOptions,
    OwnTolerance,
    Phase,
    Properties,
    Support,
    Tier,
    interpreting,
)
from minideepinfer.operators.epilogue import EpilogueOperator, Quantization
from minideepinfer.operators.families import FAMILIES
from minideepinfer.operators.hookspecs import ENTRY_POINT_GROUP, hookimpl
from minideepinfer.operators.indexer import IndexerOperator
from minideepinfer.operators.moe import MoeOperator, MoeWeights, PackedExperts, SharedExpert
from minideepinfer.operators.plan import Plan, PlanKey, PlannedOperator
from minideepinfer.operators.problem import (
    AttentionProblem,
    CommProblem,
    EpilogueProblem,
    IndexerProblem,
    MoeProblem,
    Problem,
    ResidualProblem,
)
from minideepinfer.operators.registry import OperatorRegistry, RegisteredOperator, load_registry
from minideepinfer.operators.residual import Coefficients, Entered, HyperConnectionWeights, ResidualOperator
from minideepinfer.operators.resolve import resolve
from minideepinfer.operators.selection import TOKEN_INDICES, IndexerOutput, Selection

__all__ = [
    "CONTRACT_VERSION",
    "ENTRY_POINT_GROUP",
    "FAMILIES",
    "TOKEN_INDICES",
    "Arrived",
    "AttentionOperator",
    "AttentionProblem",
    "Batch",
    "BuildContext",
    "Coefficients",
    "CommOperator",
    "CommProblem",
    "Cost",
    "Dispatched",
    "Entered",
    "EpilogueOperator",
    "EpilogueProblem",
    "HyperConnectionWeights",
    "IndexerOperator",
    "IndexerOutput",
    "IndexerProblem",
    "MoeOperator",
    "MoeProblem",
    "MoeWeights",
    "NoClock",
    "OperatorBuilder",
    "OperatorDeclaration",
    "OperatorOptions",
    "OperatorRegistry",
    "OwnTolerance",
    "PackedExperts",
    "Pending",
    "Phase",
    "Plan",
    "PlanKey",
    "PlannedOperator",
    "Problem",
    "Properties",
    "Quantization",
    "RegisteredOperator",
    "ResidualOperator",
    "ResidualProblem",
    "Selection",
    "SharedExpert",
    "Stage",
    "StageClock",
    "Support",
    "Tier",
    "TokenExchange",
    "build",
    "hookimpl",
    "interpreting",
    "load_registry",
    "resolve",
]
