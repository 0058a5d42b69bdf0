"""What ranks tell each other, in any order and of any size; here the ranks are threads of one process."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from minideepinfer import LLM, ConfigError, EngineConfig, RankError
from minideepinfer.checkpoint import Checkpoint
from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.runtime import world as worlds
from minideepinfer.runtime.agreement import agree, facts
from minideepinfer.runtime.problems import resolve_device
from minideepinfer.runtime.world import World, _Ranks, join
from rank_worlds import free_port, rank_variables


def run(size: int, work: Callable[[World], Any], timeout: float = 20.0, missing: int = 0) -> list[Any]:
    """What the work of each rank returns, or raises; some ranks never come."""
    results: list[Any] = [None] * (size - missing)

    def live(rank: int) -> None:
        try:
            world = _Ranks(rank, size, timeout)
            with world.together():
                results[rank] = work(world)
            world.close()
        except BaseException as error:
            results[rank] = error

    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with mock.patch.dict(os.environ, variables), mock.patch.object(worlds.dist, "is_initialized", lambda: False):
        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size - missing)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def test_everybody_learns_what_everybody_says() -> None:
    def work(world: World) -> Any:
        told = []
        for step in range(4):
            time.sleep(0.01 * ((world.rank + step) % 3))
            order = world.broadcast((step, "go") if world.rank == 0 else None)
            told += [order, world.exchange((world.rank, step)), world.gather([world.rank] * step)]
        return told

    first, *others = run(3, work)
    for step in range(4):
        assert first[3 * step] == (step, "go")
        assert first[3 * step + 1] == [(rank, step) for rank in range(3)]
        assert first[3 * step + 2] == [[rank] * step for rank in range(3)]
    assert all(other[i] == ([] if i % 3 == 2 else first[i]) for other in others for i in range(12))


def test_large_values_travel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "PART_BYTES", 1000)
    tensors = [torch.arange(5000 + rank) for rank in range(2)]
    first, second = run(2, lambda world: (world.exchange(tensors[world.rank]), world.gather(tensors[world.rank])))
    for found in (*first, second[0]):
        assert all(torch.equal(got, wanted) for got, wanted in zip(found, tensors, strict=True))


def test_the_store_forgets_what_was_read() -> None:
    def work(world: Any) -> int:
        for step in range(20):
            world.broadcast(step)
            world.exchange(step)
            world.gather(step)
        return int(world._root.num_keys())

    assert max(run(2, work)) < 30


def test_one_that_raises_is_named_to_all() -> None:
    def work(world: World) -> Any:
        if world.rank == 2:
            raise ValueError("no route to host")
        return world.exchange(1)

    begin = time.monotonic()
    *others, own = run(3, work)
    assert [type(other) for other in others] == [RankError] * 2
    assert {str(other) for other in others} == {"rank 2 of 3 failed: ValueError: no route to host"}
    assert isinstance(own, ValueError)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("text", ["x" * (9 << 20), "lone \udc80"], ids=["longer than the store takes", "not Unicode"])
def test_a_cause_is_told_whatever_it_says(text: str) -> None:
    def work(world: World) -> Any:
        if world.rank == 1:
            raise ValueError(text)
        return world.exchange(1)

    other, own = run(2, work)
    assert isinstance(own, ValueError)
    assert str(other).startswith(f"rank 1 of 2 failed: ValueError: {text[:5]}") and len(str(other)) < 5000


def test_an_error_of_the_network_library_is_told() -> None:
    """Whether others are gone or the library failed here, nobody can tell; so both are said."""

    def work(world: World) -> Any:
        if world.rank == 1:
            raise RuntimeError("NCCL error: out of memory\nand more")
        return world.exchange(1)

    found = run(2, work)
    assert {str(error).partition(" took")[2] for error in found} == {
        " part no more; what rank 1 met was RuntimeError: NCCL error: out of memory"
    }


def test_one_that_does_not_come_is_named_to_all() -> None:
    def work(world: World) -> Any:
        if world.rank == 1:
            time.sleep(2.5)  # behind the patience for a step, before its own watch would end this process
        return world.exchange(1)

    first, second, third = run(3, work, timeout=4)
    assert str(first) == str(third) == "rank 1 of 3 did not come to an exchange in time"
    assert isinstance(second, RankError)


def test_one_that_never_starts_is_named_to_all() -> None:
    found = run(3, lambda world: None, timeout=1.5, missing=1)
    assert [str(error).partition(";")[0] for error in found] == ["rank 2 of 3 did not start within 1.5 s"] * 2


def test_a_port_of_something_else_is_no_store() -> None:
    """Torch's client would wait for ever for what accepts its connection and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port, begin = listener.getsockname()[1], time.monotonic()
        with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}):
            with pytest.raises(
                RankError, match=r"rank 1 of 2 cannot reach the store.*no store has answered there within 1 s"
            ):
                _Ranks(1, 2, 1.0)
            with pytest.raises(RankError, match=r"rank 0 of 2 cannot reach the store.*in use"):
                _Ranks(0, 2, 1.0)
    assert time.monotonic() - begin < 5


def test_a_further_llm_of_a_script_is_told_that_other_ranks_have_ended() -> None:
    """A script runs once on each rank, up to its first LLM."""
    for number in (0, 3):
        with mock.patch.object(worlds, "_worlds", itertools.count(number)):
            (error,) = run(2, lambda world: None, timeout=1, missing=1)
        assert str(error).startswith("rank 1 of 2 did not start within 1 s")
        assert ("further LLM of the same script" in str(error)) == (number > 0)


def test_waiting_for_orders_has_no_limit() -> None:
    def work(world: World) -> Any:
        if world.rank == 0:
            time.sleep(4)
        return world.broadcast(5)

    assert run(2, work, timeout=2) == [5, 5]


def test_a_world_that_has_ended_says_so_again() -> None:
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}):
        world = _Ranks(0, 1, 2.0)
    with pytest.raises(ZeroDivisionError), world.together():
        raise ZeroDivisionError
    for _ in range(2):
        with pytest.raises(RankError, match="rank 0 of 1 failed: ZeroDivisionError: "), world.together():
            raise AssertionError("not reached")
    world.close()


def test_ranks_that_agree_go_on_and_others_do_not() -> None:
    assert run(2, lambda world: agree(world, {"a": 1})) == [None, None]
    found = run(3, lambda world: agree(world, {"a": world.rank // 2, "b": 0} | ({"c": 1} if world.rank == 1 else {})))
    message = "ranks differ: c is 1 on rank 1 and None on rank 0; a is 1 on rank 2 and 0 on rank 0; all must be started"
    assert [str(error).startswith(message) for error in found] == [True] * 3


def test_versions_device_checkpoint_and_operators_are_compared() -> None:
    with LLM("tiny", EngineConfig(device="cpu")) as llm, Checkpoint.open("tiny") as checkpoint:
        runner = llm.engine.runner
        found = facts(runner.engine_config, checkpoint, runner.plan, runner.device)
    assert found["version of torch"] == torch.__version__
    assert found["device"] == ("cpu", None)
    assert found["config.cache.num_pages"] == 1024
    assert found["operator of comm, decode"].startswith("single (mini-deepinfer ")
    assert len([name for name in found if name.startswith("operator of moe, layer 3")]) == 2
    assert len(found["fingerprint of the checkpoint"]) == 16


def test_another_tokenizer_is_another_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(directory_of("tiny"), tmp_path / "tiny")
    found = []
    for change in (lambda file: None, lambda file: file.write_text(file.read_text() + "\n"), Path.unlink):
        change(tmp_path / "tiny" / "tokenizer.json")
        with Checkpoint.open(tmp_path / "tiny") as checkpoint:
            found.append(checkpoint.fingerprint())
    with Checkpoint.open("tiny") as checkpoint:
        assert found[0] == checkpoint.fingerprint()
    assert len(set(found)) == 3


@pytest.mark.parametrize(("size", "expert"), [("", 2), ("1", 4), ("2", 1), ("2", 4)])
def test_another_number_of_processes_is_refused_with_what_would_fit(size: str, expert: int) -> None:
    config = EngineConfig(parallel={"expert": expert, "timeout_seconds": 1}).parallel
    with mock.patch.object(worlds, "_Ranks", lambda *_: World()), mock.patch.dict(os.environ, rank_variables(0, 2, 1)):
        del os.environ["WORLD_SIZE"]
        if size:
            os.environ["WORLD_SIZE"] = size
        with pytest.raises(
            ConfigError, match=rf"are {expert}, but .*what would fit: \{{expert: {size or 1}, .*or {expert} pro"
        ):
            join(config)
        os.environ.pop("WORLD_SIZE", None)


def test_half_of_torchruns_variables_are_refused() -> None:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2", "RANK": "0"}), pytest.raises(ConfigError, match="MASTER_ADDR"):
        join(EngineConfig(parallel={"expert": 2}).parallel)


def test_one_device_is_not_for_several_ranks() -> None:
    with pytest.raises(ConfigError, match="cuda:0 is one device for 2 ranks; with `cuda` each rank takes its own"):
        resolve_device(EngineConfig(device="cuda:0", parallel={"expert": 2}))
