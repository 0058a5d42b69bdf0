"""A rank that serves or generates, until something happens to one of them: `faulty_rank.py FAULT VICTIM`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from minideepinfer import LLM, EngineConfig, MiniDeepInferError, RankError
from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.world import _Ranks
from minideepinfer_comm.group import Group

TIMEOUT = 15.0


def raises(*_: Any) -> None:
    raise ZeroDivisionError("no tile fits")


def dies(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freezes(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps(*_: Any) -> None:
    time.sleep(3600)


FAULTS = {"raise": raises, "kill": dies, "freeze": freezes, "sleep": sleeps, "sleep unheard": sleeps}


def in_the_middle_of_a_step(happen: Callable[..., None]) -> None:
    """Let it happen in the third step, in the attention of layer 6, when other ranks wait for this one's tokens."""
    execute, steps = Runner.execute, 0

    def counting(self: Runner, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            self.model.blocks[6].attention.forward = happen  # type: ignore[method-assign,assignment]
            print("now", flush=True)
        return execute(self, *args, **kwargs)

    Runner.execute = counting  # type: ignore[method-assign]


def collectives_that_raise_nothing() -> None:
    """As NCCL's: one that is given up is known to who asks, while the host waits for the device without an end."""
    given_up: list[RuntimeError] = []
    connect = _Ranks.connect

    def connected(self: _Ranks, device: torch.device) -> None:
        connect(self, device)
        self._watch.gave_up = lambda: bool(given_up)

    @contextmanager
    def meeting(self: Group) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            given_up.append(error)
            time.sleep(3600)

    _Ranks.connect = connected  # type: ignore[method-assign]
    Group.meeting = meeting  # type: ignore[method-assign]


def without_a_shard() -> str:
    directory = Path(tempfile.mkdtemp(dir=os.environ["SCRATCH"])) / "tiny"
    shutil.copytree(directory_of("tiny"), directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    return str(directory)


def main(fault: str, victim: str) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "device": os.environ.get("DEVICE", "cpu")}
    settings["parallel"] = {"expert": int(os.environ["WORLD_SIZE"]), "timeout_seconds": TIMEOUT}
    path = os.environ.get("MODEL", "tiny")
    if os.environ["RANK"] == victim:
        if fault == "config":
            settings |= {"max_tokens_per_step": 100, "ops": {"residual": "naive"}}
        elif fault == "shard":
            path = without_a_shard()
        else:
            in_the_middle_of_a_step(FAULTS[fault])
    elif fault == "sleep unheard":
        collectives_that_raise_nothing()
    with LLM(path, EngineConfig(**settings)) as llm:
        try:
            llm.generate([[5, 6, 7]] * 4)
        except RankError as first:
            try:
                llm.generate([5])
            except RankError as second:
                assert str(second) == str(first)
                print("and for good", flush=True)
            raise


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (MiniDeepInferError, ZeroDivisionError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
