"""Tensors inside dataclasses: mapping, bitwise comparison, guarded copies, poisoned allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
_FILLED = frozenset(f"{new}{kind}" for kind in ("zeros", "ones", "full") for new in ("", "new_")) | frozenset(
    f"{kind}_like" for kind in ("zeros", "ones", "full")
)
_GUARD = 512
"""Elements of a guard on either side; keeps the alignment of what lies between them."""


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """A copy of nested dataclasses and tuples in which every tensor went through a function."""
    mapped: Any = value
    if isinstance(value, Tensor):
        mapped = function(value)
    elif isinstance(value, tuple):
        mapped = tuple(map_tensors(item, function) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        mapped = replace(value, **{f.name: map_tensors(getattr(value, f.name), function) for f in fields(value)})
    result: T = mapped
    return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dataclasses and tuples."""
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    yield from found


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, NaN payloads and the sign of zero included."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def poison(tensor: Tensor) -> Tensor:
    """Fill in place with what must never be used: NaN, or a large number where there is none."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(True if tensor.dtype is torch.bool else min(torch.iinfo(tensor.dtype).max, 2_147_480_000))


class Guarded:
    """Copies of tensors, each between two poisoned guards of one larger buffer."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """The copy of one tensor, contiguous."""
        buffer = poison(tensor.new_empty(tensor.numel() + 2 * _GUARD))
        inner = buffer[_GUARD : _GUARD + tensor.numel()].view(tensor.shape)
        inner.copy_(tensor)
        self._buffers.append((buffer, buffer.clone()))
        return inner

    def untouched(self) -> bool:
        """Whether no copy and no guard was written to."""
        return all(same_bits(buffer, before) for buffer, before in self._buffers)


class PoisonedAllocations(TorchDispatchMode):
    """Inside, memory that torch hands out lies between two poisoned guards, and holds poison if nobody filled it.

    An output that is not completely written shows, and so does a store past the end of an output or a workspace.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Move what an allocating function returns between guards."""
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in _EMPTY:
            result = poison(result)
        return self._between_guards(result) if name in _EMPTY | _FILLED else result

    def _between_guards(self, tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous():
            return tensor
        buffer = poison(tensor.new_empty(tensor.numel() + 2 * _GUARD))
        self._buffers.append(buffer)
        return buffer[_GUARD : _GUARD + tensor.numel()].view(tensor.shape).copy_(tensor)

    def untouched(self) -> bool:
        """Whether no guard was written to."""
        guards = (guard for buffer in self._buffers for guard in (buffer[:_GUARD], buffer[-_GUARD:]))
        return all(same_bits(guard, poison(torch.empty_like(guard))) for guard in guards)
