"""A look at what an operator returned: shape, dtype and device only, so that it costs no synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minideepinfer.errors import OperatorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def checked(result: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, who: str) -> Tensor:
    """Pass a tensor on if it is what the contract says.

    Args:
        result: what the operator returned.
        shape: needed shape; a wrong one could be broadcast into nonsense later.
        dtype: needed dtype.
        device: needed device.
        who: the operator, as the message calls it.

    Raises:
        OperatorError: it is no dense tensor, or has another shape or dtype, or lies elsewhere.
    """
    found = [getattr(result, name, None) for name in ("shape", "dtype", "device")]
    dense = not getattr(result, "is_sparse", False)
    if not dense or found[0] is None or [tuple(found[0]), *found[1:]] != [tuple(shape), dtype, device]:
        what = type(result).__name__ if found[1] is None else f"{list(found[0] or ())} in {found[1]}"
        where = ""
        if found[2] not in (None, device):
            what, where = f"{what} on {found[2]}", f" on {device}"
        raise OperatorError(
            f"{who} returned {'' if dense else 'sparse '}{what}; {list(shape)} in {dtype}{where} is needed"
        )
    tensor: Tensor = result
    return tensor
