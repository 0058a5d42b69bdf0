"""The released checkpoint layout: what must be there, whether it is, reading it, and making a tiny one.

What needs torch (`Checkpoint`) is imported when it is first named, so that sizes and names need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minideepinfer.checkpoint.layout import TensorSpec, expected_tensors
from minideepinfer.checkpoint.verify import Inventory, Summary, Total, verify

if TYPE_CHECKING:
    from minideepinfer.checkpoint.reader import Checkpoint

__all__ = ["Checkpoint", "Inventory", "Summary", "TensorSpec", "Total", "expected_tensors", "verify"]


def __getattr__(name: str) -> Any:
    if name == "Checkpoint":
        from minideepinfer.checkpoint.reader import Checkpoint

        return Checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
