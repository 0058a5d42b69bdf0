"""Moving what the host knows to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device. The host does not wait for the copy, and so stays ahead of the device.

    Args:
        tensor: in host memory, any shape; not written to before the device has come this far.
        device: where it is needed.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
