"""What every part of `two_gpus_parts.py` uses: sizes, operators, and times that are those of the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from minideepinfer.operators import (
    CommProblem,
    MoeProblem,
    Phase,
    PlannedOperator,
    Problem,
    build,
    load_registry,
)
from minideepinfer.runtime.world import World

OPERATORS = ("collective", "all_to_all")
SLEEP_CYCLES = 2_000_000
"""About a millisecond, in which the host queues what is timed."""
L2_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    hidden: int
    inner: int
    experts: int
    topk: int
    tokens: tuple[int, ...]
    check_tokens: int
    table_rows: int
    row_bytes: tuple[int, int]
    columns: int
    repeats: int
    layers: int


RELEASED = Sizes(5120, 2304, 384, 6, (128, 1024, 4096), 64, 4 << 20, (256, 8), 24, 20, 28)
TINY = Sizes(64, 32, 8, 3, (5, 9), 6, 500, (64, 2), 4, 2, 10)


class Bench:
    """This rank's view of the run.

    Attributes:
        keep: writes what a part has found so far.
    """

    def __init__(self, device: torch.device, sizes: Sizes, ranks: World) -> None:
        self.keep: Callable[[dict[str, Any]], None] = lambda found: None
        self.device, self.sizes, self.ranks, self.cuda = device, sizes, ranks, device.type == "cuda"
        self.rank, self.world = ranks.rank, ranks.size
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self._registry = load_registry()
        self._flush = torch.empty(L2_FLUSH_BYTES if self.cuda else 1, dtype=torch.uint8, device=device)
        self._facts: dict[str, Any] = {
            "phase": Phase.PREFILL,
            "device": device.type,
            "capability": torch.cuda.get_device_capability(device) if self.cuda else None,
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_quantization": "none",
            "activation_quantization": "none",
        }

    def comm(self, name: str, experts: int | None = None) -> Any:
        """A built comm operator, for another number of experts if one is given; `single` for one rank."""
        sizes, world = self.sizes, 1 if name == "single" else self.world
        experts = experts or sizes.experts
        problem = CommProblem(hidden_size=sizes.hidden, num_experts=experts, world_size=world, **self._facts)
        return self._build("comm", name, problem)

    def moe(self, name: str, ranks: int) -> Any:
        """A built MoE operator of one of so many ranks."""
        sizes = self.sizes
        problem = MoeProblem(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.inner,
            num_experts=sizes.experts,
            num_local_experts=sizes.experts // ranks,
            topk=sizes.topk,
            num_shared_experts=1,
            routed_scaling=1.0,
            swiglu_limit=10.0,
            world_size=ranks,
            **self._facts,
        )
        return self._build("moe", name, problem)

    def _build(self, family: str, name: str, problem: Problem) -> Any:
        registered = self._registry.get(family, name)
        options = registered.declaration.options()
        return build(PlannedOperator(registered, options, problem, "explicit: two_gpus", {}), self.device)

    def generator(self, seed: int) -> torch.Generator:
        """Random numbers, for one seed the same on every rank."""
        return torch.Generator(self.device).manual_seed(seed)

    def time(self, call: Callable[[], Any]) -> float:
        """Median milliseconds of the slowest rank; the ranks start together, with cold caches.

        On a GPU the time between two events, behind a sleep in which the host queues the call; what makes the host
        wait for the device waits for the end of the sleep, and from there on it counts.
        """
        for _ in range(2):
            call()
        times = [self._once(call) for _ in range(self.sizes.repeats)]
        slowest = torch.tensor(times, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def _once(self, call: Callable[[], Any]) -> float:
        self._flush.fill_(1)
        meet = torch.zeros(1, device=self.device)
        dist.all_reduce(meet)
        if not self.cuda:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def everywhere(self, condition: bool) -> bool:
        """Whether something holds on every rank."""
        agreed = torch.tensor([int(condition)], device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed.item())

    def worst(self, number: float) -> float:
        """The largest number of any rank."""
        largest = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest.item())
