"""What a plugin says about an operator, without importing torch.

A declaration is data: it can be listed, compared and refused before anything heavy is imported. Only `build` names
code, as an import path that is resolved when the operator was chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

CONTRACT_VERSION = 1
"""Version of everything in this package that a plugin relies on; a declaration made for another one is refused."""


def interpreting() -> bool:
    """Whether Triton kernels are interpreted in this process (read by Triton when a kernel is declared)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Tier(StrEnum):
    """How far an operator can be trusted to be chosen without being named."""

    REFERENCE = "reference"
    OPTIMIZED = "optimized"
    EXPERIMENTAL = "experimental"


class Phase(StrEnum):
    """Which rows an operator serves: `decode` = few new rows behind a cached context, `prefill` = all else."""

    PREFILL = "prefill"
    DECODE = "decode"


class OperatorOptions(BaseModel):
    """Base of an operator's typed options; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Support:
    """The part of an operator's limits that is plain data.

    Attributes:
        devices: device types served, e.g. `("cpu", "cuda")`.
        dtypes: compute dtypes served, e.g. `("float32", "bfloat16")`.
        phases: phases served.
        min_capability: lowest CUDA compute capability as `(major, minor)`; None = any.
        max_capability: highest CUDA compute capability, inclusive; None = any.
        requires: importable modules that must exist, e.g. `("triton",)`.
        interpreted: also runs on the CPU, slowly, where `TRITON_INTERPRET=1` makes Triton interpret its kernels; for
            tests, `auto` never picks an operator that would be interpreted.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    phases: tuple[Phase, ...] = (Phase.PREFILL, Phase.DECODE)
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    requires: tuple[str, ...] = ()
    interpreted: bool = False

    def serves(self, device: str) -> bool:
        """Whether it runs on a device type here, natively or interpreted."""
        return device in self.devices or (device == "cpu" and self.interpreted and interpreting())


@dataclass(frozen=True)
class OwnTolerance:
    """An operator's own row of the conformance kit's tolerance table.

    Attributes:
        dtype: compute dtype for which it stands.
        factor: multiplies the family's bound: below 1 tightens it, above 1 loosens it.
        reason: why a looser bound is right, with its derivation; needed if `factor` > 1, printed by every report.
        options: the row stands only where the operator's options have these values; empty = always. The first row
            that matches stands.
    """

    dtype: str
    factor: float
    reason: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Properties:
    """Promises that the conformance kit holds an operator to.

    Attributes:
        deterministic: the same inputs give bitwise the same outputs; an indexer also obeys the tie rule.
        batch_invariant: a row's result does not depend, bitwise, on the other rows of the batch.
        graph_capturable: `run` may be recorded in a CUDA graph.
    """

    deterministic: bool = True
    batch_invariant: bool = False
    graph_capturable: bool = False


@dataclass(frozen=True)
class OperatorDeclaration:
    """One named implementation of one operator family.

    Attributes:
        family: operator family, e.g. `attention`; the engine's families are in `minideepinfer.operators.FAMILIES`.
        name: unique within the family; lower case, digits, `-` and `_`.
        summary: one sentence.
        build: import path `package.module:callable`; called as `build(context)` with a `BuildContext`.
        source: where the algorithm comes from (spec section, paper, article).
        tier: see `Tier`; `auto` never picks an experimental operator.
        priority: among operators that `auto` may pick, the highest one that supports the problem wins.
        accepts: named, versioned layouts the operator reads, by role, e.g. `{"cache": ("float32", "bf16")}`.
        emits: named, versioned layouts the operator writes, by role, e.g. `{"selection": ("token_indices/1",)}`.
        support: limits as data.
        refuses: limits as code: takes the family's problem, returns one sentence "has X, needs Y" per obstacle.
        properties: promises.
        tolerances: its own rows of the tolerance table; without one the family's bound holds.
        options: pydantic model of the operator's own options.
        contract_version: version of the operator contract the plugin was written for.
    """

    family: str
    name: str
    summary: str
    build: str
    source: str = ""
    tier: Tier = Tier.EXPERIMENTAL
    priority: int = 0
    accepts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    emits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    support: Support = Support()
    refuses: Callable[[Any], list[str]] | None = None
    properties: Properties = Properties()
    tolerances: tuple[OwnTolerance, ...] = ()
    options: type[OperatorOptions] = OperatorOptions
    contract_version: int = CONTRACT_VERSION
