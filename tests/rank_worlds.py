"""LLMs of several ranks for tests: rank 0 is this process, the others are processes, started once for a size."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


class OtherRanks:
    """Ranks 1 and up of a size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SERVE)],
                env=os.environ | rank_variables(rank, size, 0) | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, size)
        ]

    @contextmanager
    def llm(self, path: str | Path, **settings: Any) -> Iterator[LLM]:
        """An LLM of all ranks, of which this process is rank 0."""
        settings["parallel"] = {"expert": self.size}
        port = free_port()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"port": port, "path": str(path), "settings": settings}) + "\n")
            process.stdin.flush()
        if dist.is_initialized():  # a comm operator of another test has made itself a group
            dist.destroy_process_group()
        with mock.patch.dict(os.environ, rank_variables(0, self.size, port)):
            llm = LLM(path, EngineConfig(**settings))
        with llm:
            yield llm
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "left\n"

    def close(self) -> None:
        for process in self.processes:
            process.communicate()
            assert process.returncode == 0
