"""What every family is asked as a part of a model."""

from __future__ import annotations

from minideepinfer.testing.contract import ExplicitCase
from minideepinfer.testing.end_to_end import end_to_end
from minideepinfer.testing.loading import l1, l2

END_TO_END = ExplicitCase(
    "end-to-end",
    "state that one layer, step or phase leaves to another; numbers that only a model has",
    end_to_end,
)
L1 = ExplicitCase("L1", "a scale block size that is guessed from shapes, or taken to be the usual one", l1)
L2 = ExplicitCase("L2", "a format that is guessed from shapes: bytes over scales is 16, columns over scales 32", l2)
WHOLE_MODEL = (L1, L2, END_TO_END)
