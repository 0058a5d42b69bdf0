"""LLMs of several ranks for tests: rank 0 is this process, the others are processes, started once for a size."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from minideepinfer import LLM, EngineConfig

SERVE = Path(__file__).parent / "serve_rank.py"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in found.items()}


class Worlds:
    """LLMs of several sizes, one at a time; the processes of a size are started once and serve all of them."""

    def __init__(self) -> None:
        self._others: dict[int, list[subprocess.Popen[str]]] = {}
        self._open: tuple[Any, ...] = ()
        self._llm: LLM | None = None

    def llm(self, size: int, path: str | Path = "tiny", **settings: Any) -> LLM:
        """An LLM of so many ranks, of which this process is rank 0; another one that is open is closed."""
        wanted = (size, path, json.dumps(settings))
        if self._llm is None or self._open != wanted:
            self._close_llm()
            self._llm, self._open = self._start(size, path, settings | {"parallel": {"expert": size}}), wanted
        return self._llm

    def close(self) -> None:
        self._close_llm()
        for process in (process for processes in self._others.values() for process in processes):
            process.communicate()
            assert process.returncode == 0

    def _start(self, size: int, path: str | Path, settings: dict[str, Any]) -> LLM:
        port = free_port()
        if size not in self._others:
            self._others[size] = _started(size)
        for process in self._others[size]:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"port": port, "path": str(path), "settings": settings}) + "\n")
            process.stdin.flush()
        if dist.is_initialized():  # a comm operator of another test has made itself a group
            dist.destroy_process_group()
        with mock.patch.dict(os.environ, rank_variables(0, size, port)):
            return LLM(path, EngineConfig(**settings))

    def _close_llm(self) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None
            for process in self._others[self._open[0]]:
                assert process.stdout is not None
                assert process.stdout.readline() == "left\n"


def _started(size: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, str(SERVE)],
            env=os.environ | rank_variables(rank, size, 0) | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, size)
    ]
