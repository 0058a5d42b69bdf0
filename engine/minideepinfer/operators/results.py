"""A look at what an operator returned: shapes and dtypes only, so that it costs no synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minideepinfer.errors import OperatorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def checked(result: Any, shape: Sequence[int], dtype: torch.dtype, who: str) -> Tensor:
    """Pass a tensor on if it is what the contract says.

    Args:
        result: what the operator returned.
        shape: needed shape; a wrong one could be broadcast into nonsense later.
        dtype: needed dtype.
        who: the operator, as the message calls it.

    Raises:
        OperatorError: it is no tensor, or has another shape or dtype.
    """
    found = getattr(result, "shape", None), getattr(result, "dtype", None)
    if found[0] is None or tuple(found[0]) != tuple(shape) or found[1] != dtype:
        what = type(result).__name__ if found[1] is None else f"{list(found[0] or ())} in {found[1]}"
        raise OperatorError(f"{who} returned {what}; {list(shape)} in {dtype} is needed")
    tensor: Tensor = result
    return tensor
