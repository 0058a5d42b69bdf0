"""The ranks of one model: how they start, tell each other small things, and stop together.

Besides the launcher, the only module of the engine that imports torch.distributed. Numbers travel through comm
operators, which use the default process group that is made here. All else (new requests, who has work, results, faults)
goes through a key-value store that rank 0, or torchrun, serves: the ranks may wait in it as long as nobody asks for
anything, and it still answers when a collective has failed.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, PrefixStore, TCPStore

from minideepinfer.config import ParallelConfig
from minideepinfer.errors import ConfigError, MiniDeepInferError, RankError
from minideepinfer.runtime.watch import POISON, Watch, named

T = TypeVar("T")

PART_BYTES = 4 << 20
"""Most bytes of one value in the store, which takes 8 MiB."""

_ONE_LLM = "; this is a further LLM of the same script, but other ranks serve the first one, and end with it"
_LONGEST_CAUSE = 4000
_FOREVER = timedelta(days=3650)
_worlds = count()


class _Lost(RankError):
    """Others did not answer."""


class World:
    """A world of one rank.

    Attributes:
        rank: this one, from 0.
        size: ranks in all.
    """

    rank = 0
    size = 1

    def connect(self, device: torch.device) -> None:
        """Make the process group that comm operators use."""

    def broadcast(self, value: T) -> T:
        """What rank 0 gave; other ranks wait for it as long as it takes."""
        return value

    def exchange(self, value: T, *, patient: bool = False) -> list[T]:
        """What every rank gave, in rank order, on every rank.

        Args:
            value: can be pickled.
            patient: wait as long as the others live, not just as long as in a step.
        """
        return [value]

    def gather(self, value: T) -> list[T]:
        """What every rank gave, in rank order, on rank 0; nothing elsewhere."""
        return [value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Something that every rank does at the same time: an error of one of them ends it on all.

        Raises:
            RankError: another rank failed, died or did not come; names it and the cause. This rank's own error passes
                unchanged. In both cases this world has ended.
        """
        yield

    def close(self) -> None:
        """Leave. Rank 0 stays until the others have left, since it may serve the store."""


def join(config: ParallelConfig) -> World:
    """Meet the other ranks, as many as `WORLD_SIZE` says (torchrun sets it; without it this is one rank).

    Raises:
        RankError: a rank did not start within the timeout.
        ConfigError: the config asks for another number of ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        _check_size(config, 1)
        return World()
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set; torchrun sets all of them")
    world = _Ranks(int(os.environ["RANK"]), size, config.timeout_seconds)
    with world.together():
        _check_size(config, size)
    return world


def _check_size(config: ParallelConfig, size: int) -> None:
    if config.expert != size:
        processes = "this is one process" if size == 1 else f"there are {size} processes"
        raise ConfigError(
            f"parallel: expert and data are {config.expert}, but {processes}; what would fit: {{expert: {size}, "
            f"data: {size}}} here, or {config.expert} processes (torchrun --nproc-per-node {config.expert}, or "
            f"generate --nproc {config.expert})"
        )


class _Ranks(World):
    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self.failure = ""
        self._timeout, self._round = timeout, count()
        self._posted: list[str] = []
        self._done: list[str] = []
        served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Torchrun's store outlives a world, and keeps its keys.
        self._number = next(_worlds)
        self._prefix = f"mini-deepinfer/{self._number}" if served_by_torchrun else "mini-deepinfer"
        self._root = self._connection(serve=rank == 0 and not served_by_torchrun)
        self._store = PrefixStore(self._prefix, self._root)
        self._watch = Watch(PrefixStore(self._prefix, self._connection()), rank, size, timeout)
        self._watch.beat()
        self._meet()
        self._root.set_timeout(_FOREVER)  # the watch ends what takes too long
        self._watch.start()

    def _connection(self, serve: bool = False) -> TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=self._timeout)
        answers: queue.SimpleQueue[TCPStore | RuntimeError] = queue.SimpleQueue()

        def connect() -> None:
            try:
                answers.put(TCPStore(host, port, None, serve, wait, wait_for_workers=False, multi_tenant=True))
            except RuntimeError as error:
                answers.put(error)

        threading.Thread(target=connect, daemon=True).start()  # at a port of something else it waits for ever
        try:
            found = answers.get(timeout=self._timeout + 1)
        except queue.Empty:
            found = RuntimeError(f"no store has answered there within {self._timeout:g} s")
        if isinstance(found, TCPStore):
            return found
        reason = str(found).partition("\n")[0]
        raise RankError(f"rank {self.rank} of {self.size} cannot reach the store at {host}:{port}: {reason}")

    def _meet(self) -> None:
        beats = [f"beat/{rank}" for rank in range(self.size)]
        late = [0]  # if there is no answer, whoever serves the store has gone
        try:
            # Rank 0 waits a little longer: it may serve the store, where the others find out who is late.
            self._store.wait(beats, timedelta(seconds=self._timeout + (1 if self.rank == 0 else 0)))
        except RuntimeError:
            with suppress(RuntimeError):
                late = [rank for rank, beat in enumerate(beats) if not self._store.check([beat])]
            hint = _ONE_LLM if self._number and self.rank == 0 else ""
            raise RankError(f"{named(late, self.size)} did not start within {self._timeout:g} s{hint}") from None

    def connect(self, device: torch.device) -> None:
        if dist.is_initialized():
            raise MiniDeepInferError("torch.distributed is initialised already; an LLM of several ranks does it itself")
        backend, bound = "gloo", None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend, bound = "cpu:gloo,cuda:nccl", device
        dist.init_process_group(
            backend,
            store=PrefixStore(f"{self._prefix}/group", self._connection()),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self._watch.patience),
            device_id=bound,
        )
        if bound is not None:  # NCCL runs on the device: the host may wait there, where no error of it is raised
            self._watch.gave_up = lambda: _nccl_gave_up(bound)

    def broadcast(self, value: T) -> T:
        """See `World`. It begins a step: whatever was posted two steps ago has been read by everybody."""
        for key in self._done:
            self._store.delete_key(key)
        self._done, self._posted = self._posted, []
        number = next(self._round)
        if self.rank == 0:
            self._post(number, value)
            return value
        received: T = self._take(number, [0], None)[0]
        return received

    def exchange(self, value: T, *, patient: bool = False) -> list[T]:
        number = next(self._round)
        self._post(number, value)
        others = [rank for rank in range(self.size) if rank != self.rank]
        received = self._take(number, others, None if patient else self._watch.patience)
        received.insert(self.rank, value)
        return received

    def gather(self, value: T) -> list[T]:
        number = next(self._round)
        if self.rank:
            self._post(number, value)
            return []
        return [value, *self._take(number, range(1, self.size), self._watch.patience)]

    @contextmanager
    def together(self) -> Iterator[None]:
        if self.failure:
            raise RankError(self.failure)
        self._watch.enter()
        try:
            yield
        except BaseException as error:
            verdict = self._fail(error)
            if _is_loss(error):
                raise RankError(verdict) from error
            raise
        finally:
            self._watch.leave()

    def close(self) -> None:
        if not self.failure:
            self.failure = "the model was closed"
            self._say(f"left/{self.rank}")
            if dist.is_initialized():
                dist.destroy_process_group()
            self._end()

    def _fail(self, error: BaseException) -> str:
        """Tell the others, leave, and find out what has happened; the watch ends what gets stuck here as well."""
        self._watch.notice()
        met = f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE].encode(errors="replace").decode()
        if not _is_loss(error):
            self.failure = f"rank {self.rank} of {self.size} failed: {met}"
        self._say(f"stopped/{self.rank}", fault=self.failure)
        if dist.is_initialized():
            _abandon_group()
        self.failure = self.failure or self._watch.settle(met.partition("\n")[0])
        self._say(f"left/{self.rank}")
        self._end()
        return self.failure

    def _say(self, key: str, fault: str = "") -> None:
        """Set a key, and a fault if there is none yet, in a store that may be gone."""
        with suppress(RuntimeError):
            if fault and not self._watch.store_gone:
                self._store.compare_set("fault", "", fault)
            if not self._watch.store_gone:
                self._store.set(key, "1")

    def _end(self) -> None:
        self._watch.wait_for_others()
        self._watch.stop()
        del self._store, self._root

    def _post(self, number: int, value: Any) -> None:
        data, key = pickle.dumps(value, pickle.HIGHEST_PROTOCOL), f"{number}/{self.rank}"
        parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
        for index, part in enumerate(parts[1:], start=1):
            self._store.set(f"{key}/{index}", part)  # type: ignore[arg-type]  # bytes are fine
            self._posted.append(f"{key}/{index}")
        self._store.set(key, len(parts).to_bytes(4, "big") + parts[0])  # type: ignore[arg-type]
        self._posted.append(key)

    def _take(self, number: int, ranks: Sequence[int], seconds: float | None) -> list[Any]:
        keys = [f"{number}/{rank}" for rank in ranks]
        self._watch.await_keys(keys, seconds)
        try:
            found = self._store.multi_get(keys)
        finally:
            self._watch.arrived()
        return [self._value(key, first) for key, first in zip(keys, found, strict=True)]

    def _value(self, key: str, first: bytes) -> Any:
        if first.startswith(POISON):
            raise _Lost(first.removeprefix(POISON).decode())
        parts = [first[4:], *(self._store.get(f"{key}/{i}") for i in range(1, int.from_bytes(first[:4], "big")))]
        return pickle.loads(b"".join(parts))


def _is_loss(error: BaseException | None) -> bool:
    """Whether an error only says that others are gone, in the store or in a collective."""
    while error is not None:
        if isinstance(error, (_Lost, dist.DistError)):
            return True
        if type(error) is RuntimeError and any(word in str(error).lower() for word in ("gloo", "nccl")):
            return True
        error = error.__cause__
    return False


def _nccl_gave_up(device: torch.device) -> bool:
    group = dist.group.WORLD
    return group is not None and group._get_backend(device).get_error() != ErrorType.SUCCESS


def _abandon_group() -> None:
    """Close connections, so that others notice; collectives of NCCL that wait are given up."""
    with suppress(RuntimeError):
        if dist.get_backend() != "gloo" and (group := dist.group.WORLD) is not None:
            group.abort()
        else:
            dist.destroy_process_group()
