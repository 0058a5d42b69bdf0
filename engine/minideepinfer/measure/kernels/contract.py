"""What `bench kernel` must know about a family: named problems, how a call is made, judged and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minideepinfer.operators.cost import Cost

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minideepinfer.measure.timing import Call
    from minideepinfer.testing.contract import Outputs
    from minideepinfer.testing.subject import Subject

Compare = Callable[["Subject", Any, Mapping[str, "Tensor"], Mapping[str, "Tensor"], float], None]


@dataclass(frozen=True)
class Kernel:
    """One call of an operator that is timed.

    Attributes:
        bind: from the subject, its built operator and a case to the call itself: what is prepared once, is done.
        outputs: what the call returned, by the names of the conformance kit.
        cost: the least that the case costs.
        compare: as `Conformance.compare`, where that of the family does not look at these outputs.
    """

    bind: Callable[[Subject, Any, Any], Call]
    outputs: Callable[[Any, Any], Outputs]
    cost: Callable[[Any], Cost]
    compare: Compare | None = None


@dataclass(frozen=True)
class KernelFamily:
    """One family.

    Attributes:
        family: its name.
        problems: by preset and name: what is called, and the sizes, as a recipe of the conformance kit.
        make: the case of a recipe with its numbers drawn on a device, which is quick where the recipe's own `build` is
            made for small cases, and without the kit's NaN in what no row reads.
        sample: rows of a large case, and a case of these rows alone on the same numbers, where it is to be judged; rows
            None = all.
    """

    family: str
    problems: Mapping[str, Mapping[str, tuple[Kernel, Any]]]
    make: Callable[[Any, torch.device], Any]
    sample: Callable[[Any], tuple[Tensor | None, Any]]
