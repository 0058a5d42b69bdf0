"""What `build` is given: the problem, the operator's options, and the engine's services."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from minideepinfer.operators.declaration import OperatorOptions

if TYPE_CHECKING:
    import torch


class Stage(StrEnum):
    """Stages of a step, as tables, traces and records call them. An operator may report others."""

    KEY_GATHER = "key gather"
    """Copying, translating and storing window and selected entries around the attention core."""
    FP4_DECODING = "FP4 decoding"
    MIXING = "mHC and norms"
    ATTENTION = "attention core"
    INDEXER = "indexer"
    GATE = "gate"
    PROJECTIONS = "attention projections"
    """With rotation, the small norms and quantisation around them, the compressor's and the index queries'."""
    GROUPED_GEMM = "grouped GEMM"
    """Products of the routed experts, with activation and the sorting of rows."""
    SHARED_EXPERT = "shared expert"
    COMBINE = "combine"
    COMMUNICATION = "communication"
    ENGRAM = "Engram"
    HEAD = "embedding and head"
    OTHER = "other"


class StageClock(Protocol):
    """Where an operator reports the stages inside it, so that a stage table can tell them apart.

    An operator in which one stage cannot be told from another one says so in an attribute `fuses` of what it builds,
    e.g. `{Stage.FP4_DECODING: Stage.GROUPED_GEMM}`: the first happens, wholly or partly, inside the second.
    """

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Attribute the time spent inside to a stage; an inner stage's time is not counted in the outer one."""
        ...


class NoClock:
    """A `StageClock` that measures nothing."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return self._nothing


@dataclass(frozen=True)
class BuildContext:
    """The only argument of an operator's `build`.

    Attributes:
        problem: the family's problem; it passed the operator's own `support` and `refuses`.
        options: instance of the declaration's options model.
        device: where tensors will live.
        clock: see `StageClock`.
    """

    problem: Any
    options: OperatorOptions
    device: torch.device
    clock: StageClock = field(default_factory=NoClock)
