"""A rank that raises, dies, hangs or differs ends all others in time, with an error that names it and the cause."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import measured
import pytest
from faulty_rank import TIMEOUT
from rank_worlds import free_port, rank_variables

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
SCRIPT = Path(__file__).parent / "faulty_rank.py"


def start(fault: str, victim: int, port: int, scratch: Path) -> list[subprocess.Popen[str]]:
    """Two ranks, to one of which something happens."""
    variables = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "SCRATCH": str(scratch)}
    command = [sys.executable, str(SCRIPT), fault, str(victim)]
    return [
        subprocess.Popen(command, env=variables | rank_variables(rank, 2, port), stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]


def wait_for_now(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"


IN_A_STEP = {
    "raise": r"ZeroDivisionError: no tile fits",
    "kill": r"has ended or hangs: no sign of life|is gone",
    "freeze": r"has ended or hangs: no sign of life",
    "sleep": r"took part no more|did not come to an exchange in time",
}

OF_THE_STORE = {"kill": "is gone", "freeze": "does not answer"}


@pytest.mark.parametrize(
    ("fault", "victim"),
    [("raise", 0), ("raise", 1), ("kill", 0), ("kill", 1), ("freeze", 0), ("freeze", 1), ("sleep", 1)],
)
def test_a_fault_in_the_middle_of_a_step_ends_all_ranks(fault: str, victim: int, tmp_path: Path) -> None:
    port = free_port()
    processes = start(fault, victim, port, tmp_path)
    faulty, other = processes[victim], processes[1 - victim]
    wait_for_now(faulty)
    begin = time.monotonic()
    other.wait(60)
    seconds = time.monotonic() - begin
    if fault in ("freeze", "sleep"):
        time.sleep(0.5)  # one that sleeps in a step is ended by its own watch; one that is frozen, by nobody
    if fault == "freeze":
        faulty.kill()
    out, error = other.communicate()
    own_error = faulty.communicate(timeout=TIMEOUT)[1]
    assert seconds < TIMEOUT, error
    measured.lines.append(f"rank {victim} of 2, {fault}: the other one ended {seconds:.1f} s later (limit {TIMEOUT} s)")
    assert other.returncode == 1
    assert re.search(f"^RankError: rank {victim} of 2.*({IN_A_STEP[fault]})", error) or (
        victim == 0 and re.search(rf"which rank 0 or torchrun serves, {OF_THE_STORE[fault]}", error)
    )
    if victim == 1:
        assert out.endswith("and for good\n")
    if fault == "raise":
        assert own_error == "ZeroDivisionError: no tile fits\n" and faulty.returncode == 1
    if fault == "sleep":
        assert "was stuck and is ended" in own_error and faulty.returncode == 1
    with socket.socket() as listener:  # the port is free again
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))


def test_one_that_hangs_while_the_other_waits_for_its_device_ends_both(tmp_path: Path) -> None:
    """Over NCCL a collective that is given up raises nothing where the host waits; gloo is made to do the same."""
    faulty, other = reversed(start("sleep unheard", 1, free_port(), tmp_path))
    wait_for_now(faulty)
    begin = time.monotonic()
    errors = [process.communicate(timeout=60)[1] for process in (other, faulty)]
    seconds = time.monotonic() - begin
    assert seconds < TIMEOUT, errors
    measured.lines.append(f"rank 1 of 2, sleep, as over NCCL: both ended {seconds:.1f} s later (limit {TIMEOUT} s)")
    verdict = "rank 1 of 2 took part no more; what rank 0 met was a collective that was given up"
    for rank, error in enumerate(errors):
        assert error.endswith(f"mini-deepinfer: {verdict}; rank {rank} was stuck and is ended\n")
    assert (other.returncode, faulty.returncode) == (1, 1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "config",
            r"ranks differ: config.max_tokens_per_step is 100 on rank 1 and 2048 on rank 0; config.ops.residual is "
            r"'naive' on rank 1 and None on rank 0; operator of residual, decode is 'naive .*explicit.* on rank 1 and "
            r"'naive .*auto.* on rank 0.*all must be started alike",
        ),
        ("shard", r"rank 1 of 2 failed: CheckpointError: .*'model-00002-of-00003.safetensors', but there is no such"),
    ],
)
def test_what_differs_is_found_at_the_start(fault: str, message: str, tmp_path: Path) -> None:
    processes = start(fault, 1, free_port(), tmp_path)
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert re.search(message, errors[0])
    assert errors[1].startswith("CheckpointError" if fault == "shard" else "RankError: ranks differ")


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v.decode().partition("=")[2] for v in variables if v.startswith(b"RANK=")), "")


@pytest.mark.parametrize(
    ("victim", "sent", "message"),
    [
        ("1", signal.SIGKILL, "rank 1 of 2 was ended by SIGKILL"),
        ("1", signal.SIGINT, "rank 1 of 2 failed: KeyboardInterrupt"),
        ("the launcher", signal.SIGTERM, "SIGTERM ended this process and its 2 ranks"),
    ],
)
def test_a_process_of_the_command_line_that_is_ended(victim: str, sent: signal.Signals, message: str) -> None:
    command = ["generate", "--nproc", "2", "--max-tokens", "400", "--ignore-eos", "--set", "device=cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "minideepinfer", *command], stdout=-1, stderr=-1, text=True, bufsize=0
    )
    assert process.stdout is not None
    while "function" not in process.stdout.readline():  # the prompt, with which generation begins
        assert process.poll() is None
    ranks = {rank_of(pid): pid for pid in children(process.pid)}
    os.kill((ranks | {"the launcher": process.pid})[victim], sent)
    begin = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert process.returncode == 1
    assert error.rstrip(": \n") == f"mini-deepinfer: {message}"  # whichever rank was first to tell
    assert [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()] == []


def test_a_mistake_is_told_once() -> None:
    command = [sys.executable, "-m", "minideepinfer", "generate", "--nproc", "2", "--ids", "5000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "mini-deepinfer: rank 0 of 2 failed: token 0 of the prompt is 5000; ids are integers 0..2047\n",
    )
