"""Two GPUs over NCCL: everything that one GPU cannot show, in one call of about two minutes.

    python benchmarks/two_gpus.py --out DIR
    python benchmarks/two_gpus.py --out DIR --device cpu

First what must be right, all at once: modules of a model in bfloat16 on two ranks against one, the conformance kit's
comm and MoE operators between processes, `LLM` on two ranks against one. Then, with nothing beside it, what is timed:
Engram rows, dispatch and combine beside plain NCCL, and the fixed benchmark with and without a network. Every job is a
process or two with a limit of time, killed with all its children, and writes as it goes; one that fails stops no other.
`DIR/two_gpus.json` has all of it. On a CPU it is a rehearsal over gloo, in small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from two_gpus_report import summary

HERE = Path(__file__).parent
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
KIT = (("comm:collective", "comm:all_to_all", "comm:symmetric"), ("moe:naive",), ("moe:fused",))
"""Jobs of operators that the same two processes serve in turn."""
ON_CUDA_ONLY = ("comm:symmetric", "moe:fused", "symmetric")
"""Of what is checked."""
PARTS = ("checks", "kit", "models", "timed")
LLM_ON = {"one-rank": (1, "auto")} | {comm: (2, comm) for comm in ("collective", "all_to_all", "symmetric")}
"""Ranks and comm operators, all compared with the first."""
GRACE = 8.0
"""Seconds that the other rank has when one has ended."""


@dataclass
class Job:
    """Processes that belong together.

    Attributes:
        name: of its logs.
        command: what every rank runs.
        seconds: after which it is killed.
        ranks: processes; more than one are told of each other as torchrun does it.
        device: of the only rank.
        verdict: exit codes and seconds, once it has ended.
    """

    name: str
    command: Sequence[str]
    seconds: float
    ranks: int = 1
    device: int = 0
    verdict: str = ""
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, out: Path) -> None:
        """Start every rank in a process group of its own."""
        self._begin = time.monotonic()
        port = _free_port()
        for rank in range(self.ranks):
            local = rank if self.ranks > 1 else self.device
            variables = {"LOCAL_RANK": local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables |= {"RANK": rank, "WORLD_SIZE": self.ranks}
            environment = os.environ | NO_MULTICAST | {name: str(value) for name, value in variables.items()}
            with (out / f"{self.name}-{rank}.log").open("wb") as log:
                self._started.append(
                    subprocess.Popen(
                        [sys.executable, *self.command],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def look(self) -> None:
        """Give the verdict if all ranks have ended; those that are late are killed."""
        codes, seconds = [process.poll() for process in self._started], time.monotonic() - self._begin
        if any(code is not None for code in codes) and None in codes:
            self.seconds = min(self.seconds, seconds + GRACE)
        if None in codes and seconds < self.seconds:
            return
        self.kill()
        late = ", killed at its limit" if None in codes else ""
        self.verdict = f"exit {' '.join(str(process.wait()) for process in self._started)}, {seconds:.0f} s{late}"
        print(f"{self.name}: {self.verdict}", flush=True)

    def kill(self) -> None:
        """End all ranks, and what they have started."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _finish(jobs: Sequence[Job]) -> None:
    while running := [job for job in jobs if not job.verdict]:
        for job in running:
            job.look()
        time.sleep(0.1)


class Jobs:
    """All that is to run, on a device, with what it writes in a directory."""

    def __init__(self, device: str, out: Path) -> None:
        self._on, self._out, self._cuda = ["--device", device], out, device == "cuda"
        self._model = Path(tempfile.mkdtemp()) / "tiny"

    def parts(self, *names: str, seconds: int, ranks: int = 2, device: int = 0) -> Job:
        """Parts of `two_gpus_parts.py`."""
        name = f"{names[0]}{device}" if ranks == 1 else names[0]
        command = [str(HERE / "two_gpus_parts.py"), *self._on, "--out", str(self._out / f"parts-{name}.json")]
        return Job(name, [*command, "--seconds", str(seconds), "--parts", *names], seconds, ranks, device)

    def checks(self) -> list[Job]:
        """What must be right; and compiling what is timed later, which takes longer than timing it."""
        jobs = [self.parts("modules", "correct", seconds=75)]
        if self._cuda:
            jobs += [self.parts("warm", seconds=70, ranks=1, device=device) for device in (0, 1)]
        return jobs

    def kit(self) -> Iterator[Job]:
        """The conformance kit."""
        for operators in KIT:
            if served := [each for each in operators if self._cuda or each not in ON_CUDA_ONLY]:
                name = f"kit-{served[0].replace(':', '-')}"
                command = [str(HERE / "two_gpus_kit.py"), *served, *self._on, "--out", str(self._out)]
                yield Job(name, command, seconds=84)

    def checkpoint(self) -> Job:
        """Makes the model that the next ones load."""
        return Job("checkpoint", ["-m", "minideepinfer", "checkpoint", "make-tiny", str(self._model)], seconds=40)

    def models(self) -> list[Job]:
        """`LLM` on one rank and on two; and the launcher."""
        jobs = []
        for name, (ranks, comm) in LLM_ON.items():
            if self._cuda or name not in ON_CUDA_ONLY:
                file = str(self._out / f"llm-{name}.pt")
                command = [str(HERE / "two_gpus_llm.py"), str(self._model), *self._on, "--comm", comm, "--out", file]
                jobs.append(Job(f"llm-{name}", command, seconds=50, ranks=ranks))
        generate = ["-m", "minideepinfer", "generate", "--nproc", "2", "--model", str(self._model), "--ids", "5,6,7"]
        generate += ["--max-tokens", "4", "--json", "--set", f"device={self._on[1]}"]
        return [*jobs, Job("generate", generate, seconds=50)]

    def timed(self) -> list[Job]:
        """What has the machine for itself, in turn."""
        return [self.parts("engram", "cost", seconds=40), self.parts("step", seconds=90)]


def _compared(out: Path) -> dict[str, Any]:
    """Largest relative error of logits and equality of tokens, two ranks against one."""
    import torch

    runs = {name: torch.load(file) for name in LLM_ON if (file := out / f"llm-{name}.pt").exists()}
    if (expected := runs.pop("one-rank", None)) is None:
        return {}
    found = {}
    for name, run in runs.items():
        pairs = zip(run["logits"], expected["logits"], strict=True)
        worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        found[name] = {"largest relative error": worst, "same tokens": run["tokens"] == expected["tokens"]}
    return found


def _collect(out: Path, jobs: Sequence[Job]) -> dict[str, Any]:
    """Everything that was written, in one record."""
    record: dict[str, Any] = {"jobs": {job.name: job.verdict for job in jobs}}
    for file in sorted(out.glob("parts-*.json")):
        if not file.stem.startswith("parts-warm"):
            record |= json.loads(file.read_text(encoding="utf-8"))
    kits = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("kit-*.json"))]
    record["kit"] = {kit.pop("operator"): kit for kit in kits}
    record["LLM"] = _compared(out)
    (out / "two_gpus.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def main() -> int:
    """Run everything; 1 if a job failed or was killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    done: list[Job] = []
    try:
        _run(Jobs(arguments.device, out.resolve()), arguments.only, out, done)
    finally:
        for job in done:
            job.kill()
        print("\n".join(summary(_collect(out, done))), flush=True)
    return int(any(set(job.verdict.partition(",")[0].split()[1:]) != {"0"} for job in done))


def _run(jobs: Jobs, only: Sequence[str], out: Path, done: list[Job]) -> None:
    """Run what is asked for; `done` gets each job when it starts."""

    def start(*some: Job) -> None:
        for job in some:
            done.append(job)
            job.start(out)

    if "checks" in only:
        start(*jobs.checks())
    if "kit" in only:
        start(*jobs.kit())
    if "models" in only:
        start(made := jobs.checkpoint())
        _finish([made])
        start(*jobs.models())
    _finish(done)
    for job in jobs.timed() if "timed" in only else []:
        _collect(out, done)
        start(job)
        _finish([job])


if __name__ == "__main__":
    sys.exit(main())
