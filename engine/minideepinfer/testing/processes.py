"""Ranks as processes, for comm operators that talk to other processes: started once for each size, and reused."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from minideepinfer.errors import OperatorError

PATIENCE = 120.0
"""Seconds within which all ranks must answer."""
GRACE = 5.0
"""Seconds that are left to the other ranks when one has failed."""


class Processes:
    """So many processes of this machine, with the variables that torchrun sets; operators make their groups of them.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        spawn = multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, size, port, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, function: Callable[[int, Any], Any], arguments: Sequence[Any]) -> list[Any]:
        """What `function(rank, arguments[rank])` returns in each process.

        Args:
            function: importable by name.
            arguments: one for each rank; can be pickled.

        Raises:
            OperatorError: a rank raised, died or did not answer in time; names it. The processes are ended.
        """
        for pipe, argument in zip(self._pipes, arguments, strict=True):
            pipe.send_bytes(pickle.dumps((function, argument)))
        answers = self._answers()
        faults = [f"rank {rank} of {self.size} {fault}" for rank, (_, fault) in answers.items() if fault]
        if faults:
            self.close()
            raise OperatorError("; ".join(faults))
        return [answers[rank][0] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
        _STARTED.pop(self.size, None)

    def _answers(self) -> dict[int, tuple[Any, str]]:
        """By rank what it returned and what went wrong, first come first; after a fault the others do not get long."""
        answers: dict[int, tuple[Any, str]] = {}
        deadline = time.monotonic() + PATIENCE
        while waiting := {self._pipes[rank]: rank for rank in range(self.size) if rank not in answers}:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready or waiting:
                rank = waiting[pipe]  # type: ignore[index]
                answers[rank] = self._answer(rank) if ready else (None, "does not answer")
                if answers[rank][1]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _answer(self, rank: int) -> tuple[Any, str]:
        try:
            value, fault = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return None, "has ended"
        return value, fault


_STARTED: dict[int, Processes] = {}


def started(size: int) -> Processes:
    """Processes of a size; the same ones at every call, until one fails."""
    if size not in _STARTED:
        _STARTED[size] = Processes(size)
        atexit.register(_STARTED[size].close)
    return _STARTED[size]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    """The life of a process: call what is asked for until the pipe is closed."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    while True:
        try:
            function, argument = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = function(rank, argument), ""
        except (Exception, SystemExit) as error:
            answer = None, f"raised {type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps(answer))
