"""The process group, and the one thing that is done with it: every rank sends some rows to every rank.

The ranks of one host are joined all to all (NVLink switch, or memory), so what a rank has for another goes there
directly: grouped sends and receives, of exact sizes, straight from and into tensors. NCCL and gloo run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from minideepinfer.errors import OperatorError
from minideepinfer.operators import BuildContext, Stage, StageClock
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from minideepinfer_comm.options import GroupOptions

S = TypeVar("S")
T = TypeVar("T")


class Move(NamedTuple):
    """One tensor for each rank, by rank, and room for what each rank has for this one."""

    sends: Sequence[Tensor]
    receives: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Travelling(Generic[T]):
    """A `Pending`: sends and receives under way, whose tensors must live until then; what is made of what arrives."""

    group: Group
    transfers: Sequence[dist.P2POp]
    works: Sequence[dist.Work]
    finish: Callable[[], T]

    def wait(self) -> T:
        """See `Pending`."""
        with self.group.clock.stage(Stage.COMMUNICATION), self.group.meeting():
            for work in self.works:
                work.wait()
        return self.finish()

    def then(self, make: Callable[[T], S]) -> Travelling[S]:
        """The same journey, of whose end something else is made."""
        return Travelling(self.group, self.transfers, self.works, lambda: make(self.finish()))


class Group:
    """All ranks of torch.distributed's default group; it is made, from torchrun's variables, if there is none.

    Args:
        context: says how many ranks are needed.

    Raises:
        OperatorError: there are more or fewer ranks.
    """

    def __init__(self, context: BuildContext) -> None:
        options, wanted = context.options, context.problem.world_size
        assert isinstance(options, GroupOptions)
        if not dist.is_initialized():
            _start(wanted, context.device, timedelta(seconds=options.timeout_seconds))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size != wanted:
            raise OperatorError(f"comm: the process group has {self.size} ranks, the plan is for {wanted}")
        self.clock: StageClock = context.clock
        self.sent_bytes = 0

    def exchange(self, moves: Iterable[Move], finish: Callable[[], T]) -> Travelling[T]:
        """Send and receive; empty tensors do not travel, so sizes must be known on both sides.

        Args:
            moves: what to send and where to put what comes; own rows are copied.
            finish: what `wait` returns.
        """
        transfers = []
        for sends, receives in moves:
            receives[self.rank].copy_(sends[self.rank])
            for peer in self._peers():
                if sends[peer].numel():
                    transfers.append(dist.P2POp(dist.isend, sends[peer].contiguous(), peer))
                    self.sent_bytes += sends[peer].nbytes
                if receives[peer].numel():
                    transfers.append(dist.P2POp(dist.irecv, receives[peer], peer))
        with self.meeting():
            works = dist.batch_isend_irecv(transfers) if transfers else ()
        return Travelling(self, transfers, works, finish)

    def exchange_numbers(self, numbers: Tensor) -> Travelling[tuple[list[int], list[int]]]:
        """Give every rank a number, 8 bytes; whoever waits for them makes the host wait.

        Args:
            numbers: int64 `[ranks]` on the compute device.

        Returns:
            On the host: the numbers, and what each rank has for this one.
        """
        both = torch.stack([numbers, torch.empty_like(numbers)])
        with self.meeting():
            work = dist.all_to_all_single(both[1], both[0], async_op=True)
        self.sent_bytes += (self.size - 1) * numbers.element_size()
        return Travelling(self, (), [work], lambda: _on_the_host(both))

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around calls of torch.distributed.

        Raises:
            OperatorError: another rank is gone, or does not come.
        """
        try:
            yield
        except RuntimeError as error:
            raise OperatorError(f"comm: rank {self.rank} of {self.size} waits in vain: {error}") from error

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all ranks send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def _on_the_host(both: Tensor) -> tuple[list[int], list[int]]:
    given, taken = both.tolist()
    return given, taken


def _start(size: int, device: torch.device, timeout: timedelta) -> None:
    """Make the default group; a world of one needs neither variables nor a port."""
    backend, bound = "gloo", None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        backend, bound = "cpu:gloo,cuda:nccl", torch.device("cuda", index)
    if size == 1:
        dist.init_process_group(backend, timeout=timeout, device_id=bound, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
