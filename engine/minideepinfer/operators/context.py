"""What `build` is given: the problem, the operator's options, and the engine's services."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from minideepinfer.operators.declaration import OperatorOptions

if TYPE_CHECKING:
    import torch


class StageClock(Protocol):
    """Where an operator reports the stages inside it, so that a stage table can tell them apart."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Attribute the time spent inside to a stage; an inner stage's time is not counted in the outer one."""
        ...


class NoClock:
    """A `StageClock` that measures nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


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
