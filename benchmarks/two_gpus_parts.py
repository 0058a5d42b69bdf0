"""Parts of `two_gpus.py` that are ranks: what the comm operators bring and cost, beside plain NCCL, and models on them.

    torchrun --nproc-per-node 2 benchmarks/two_gpus_parts.py --device cpu --out FILE --parts correct cost

Rank 0 writes what is known after each part, so that a part that hangs loses no other. `--device cpu` is a rehearsal on
gloo, in small sizes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from minideepinfer.config import ParallelConfig
from minideepinfer.measure.facts import machine, software
from minideepinfer.operators import MoeWeights, PackedExperts, SharedExpert
from minideepinfer.runtime.world import join
from torch import Tensor
from two_gpus_bench import OPERATORS, RELEASED, TINY, Bench
from two_gpus_model import modules
from two_gpus_step import fixed_step, warm

# Correct


def random_weights(bench: Bench) -> MoeWeights:
    """A layer with all experts, the same on every rank."""
    sizes, generator = bench.sizes, bench.generator(1)
    experts, hidden, inner = sizes.experts, sizes.hidden, sizes.inner

    def octets(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=bench.device, generator=generator)

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, device=bench.device, generator=generator) / columns**0.5
        return values.to(bench.dtype)

    packed = PackedExperts(
        octets(experts, 2, inner, hidden // 2),
        octets(experts, 2, inner, hidden // 32, low=118, high=121),
        octets(experts, hidden, inner // 2),
        octets(experts, hidden, inner // 32, low=118, high=121),
    )
    shared = SharedExpert(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
    gate = matrix(experts, hidden).bfloat16()
    return MoeWeights(gate, torch.zeros(experts, device=bench.device), packed, shared)


def share(whole: MoeWeights, rank: int, ranks: int) -> MoeWeights:
    """The experts of one rank."""
    each, packed = whole.experts.num_local // ranks, whole.experts
    part = slice(rank * each, (rank + 1) * each)
    tensors = (packed.w13, packed.w13_scale, packed.w2, packed.w2_scale)
    experts = PackedExperts(*(tensor[part] for tensor in tensors), expert_start=rank * each)
    return MoeWeights(whole.gate, whole.gate_bias, experts, whole.shared)


def correct(bench: Bench) -> dict[str, Any]:
    """Largest relative error of a rank's output against the same rows with all experts on this rank."""
    whole, t, each = random_weights(bench), bench.sizes.check_tokens, bench.sizes.experts // bench.world
    alone, together = bench.moe("naive", 1), bench.moe("naive", bench.world)
    mine, single = share(whole, bench.rank, bench.world), bench.comm("single")
    errors: dict[str, float] = {}
    norms: dict[str, float] = {}
    shapes = {"ragged": (t, t // 2 + 1), "rank 0 empty": (0, t), "rank 1 empty": (t, 0), "empty": (0, 0)}
    for label, first in shapes.items():
        counts = (*first, *[t // 3] * bench.world)[: bench.world]
        for skewed in (False, True):
            x = torch.randn(counts[bench.rank], bench.sizes.hidden, device=bench.device).to(bench.dtype)
            ids, scores = alone.route(x, whole)
            if skewed:  # all on experts of the last rank
                ids = ids % each + each * (bench.world - 1)
            expected = alone.run(x, whole, single.prepare((len(x),)), None, (ids, scores)).float()
            norms[f"{label}{', skewed' if skewed else ''}"] = bench.worst(float(expected.norm()))
            for name in OPERATORS:
                exchange = bench.comm(name).prepare(counts)
                found = together.run(x, mine, exchange, None, (ids, scores)).float()
                norm = float(expected.norm()) or 1.0
                error = float((found - expected).norm()) / norm if bool(found.isfinite().all()) else float("inf")
                errors[f"{name}, {label}{', skewed' if skewed else ''}"] = bench.worst(error)
    return {
        "relative error": errors,
        "norm of the expected": norms,
        "passed": all(error < 2.0**-8 for error in errors.values()),
    }


# Cost


def cost(bench: Bench) -> dict[str, Any]:
    """Milliseconds, bytes and rates of dispatch and combine, and of NCCL's own calls with as many bytes."""
    rows = {}
    for tokens in bench.sizes.tokens:
        for name in OPERATORS:
            rows[f"{name}, {tokens} tokens a rank"] = _cost(bench, name, tokens)
        rows[f"plain, {tokens} tokens a rank"] = _plain(bench, tokens)
    return rows


def _routed(bench: Bench, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = bench.generator(10 + bench.rank)
    x = torch.randn(tokens, bench.sizes.hidden, device=bench.device, generator=generator).to(bench.dtype)
    scores = torch.rand(tokens, bench.sizes.experts, device=bench.device, generator=generator)
    best = scores.topk(bench.sizes.topk)
    return x, best.indices.sort(1).values.int(), best.values


def _cost(bench: Bench, name: str, tokens: int) -> dict[str, Any]:
    comm, routed = bench.comm(name), _routed(bench, tokens)
    exchange = comm.prepare([tokens] * bench.world)
    before = comm.sent_bytes
    arrived = exchange.dispatch(*routed).wait()
    dispatch_bytes, partial = comm.sent_bytes - before, torch.zeros(arrived.x.shape, device=bench.device)
    before = comm.sent_bytes
    exchange.combine(partial, arrived.handle).wait()
    combine_bytes = comm.sent_bytes - before
    weight = torch.randn(bench.sizes.hidden, bench.sizes.inner, device=bench.device).to(bench.dtype)

    def shared() -> Tensor:
        """About the arithmetic of the shared expert."""
        return ((routed[0] @ weight) @ weight.T) @ weight

    def overlapped() -> None:
        arriving = exchange.dispatch(*routed)
        shared()
        arriving.wait()

    times = {
        "dispatch": bench.time(lambda: exchange.dispatch(*routed).wait()),
        "combine": bench.time(lambda: exchange.combine(partial, arrived.handle).wait()),
        "shared expert": bench.time(shared),
        "dispatch beside the shared expert": bench.time(overlapped),
    }
    exposed = max(0.0, times["dispatch beside the shared expert"] - times["shared expert"])
    return {
        "ms": times,
        "ms exposed of dispatch": exposed,
        "ms hidden of dispatch": max(0.0, times["dispatch"] - exposed),
        "bytes sent": {"dispatch": dispatch_bytes, "combine": combine_bytes},
        "bytes by formula": _formula(bench, name, routed, len(arrived.x)),
        "GB/s out of a rank": {
            "dispatch": dispatch_bytes / times["dispatch"] / 1e6,
            "combine": combine_bytes / times["combine"] / 1e6,
        },
    }


def _formula(bench: Bench, name: str, routed: tuple[Tensor, Tensor, Tensor], arrived: int) -> dict[str, int]:
    """What the operators' docstrings say."""
    x, ids, _ = routed
    others, row = bench.world - 1, x.shape[1] * x.element_size() + 8 * ids.shape[1]
    if name == "collective":
        return {"dispatch": others * len(x) * row, "combine": others * len(x) * x.shape[1] * 4}
    owners = ids // (bench.sizes.experts // bench.world)
    sent = sum(int((owners == rank).any(1).sum()) for rank in range(bench.world) if rank != bench.rank)
    own = int((owners == bench.rank).any(1).sum())
    return {"dispatch": sent * row + 8 * others, "combine": (arrived - own) * x.shape[1] * 4}


def _plain(bench: Bench, tokens: int) -> dict[str, Any]:
    """torch.distributed's own calls on the same rows."""
    x = _routed(bench, tokens)[0]
    everybodys = x.new_zeros(bench.world * tokens, x.shape[1])
    room = torch.empty_like(everybodys)
    summands = torch.zeros(everybodys.shape, device=bench.device)
    total = torch.zeros(x.shape, device=bench.device)
    calls = {
        "all_gather_into_tensor, tokens": (lambda: dist.all_gather_into_tensor(everybodys, x), x.nbytes),
        "all_to_all_single, as many bytes": (lambda: dist.all_to_all_single(room, everybodys), x.nbytes),
        "reduce_scatter_tensor, float32": (lambda: dist.reduce_scatter_tensor(total, summands), total.nbytes),
    }
    if not bench.cuda:
        del calls["reduce_scatter_tensor, float32"]
    times = {name: bench.time(call) for name, (call, _) in calls.items()}
    others = bench.world - 1
    return {
        "ms": times,
        "GB/s out of a rank": {name: others * size / times[name] / 1e6 for name, (_, size) in calls.items()},
    }


# Engram


def engram(bench: Bench) -> dict[str, Any]:
    """Rows of both tables of one layer, asked of their owners; and read from the peer, where that can be built."""
    sizes, rows = bench.sizes, bench.sizes.table_rows
    first = bench.rank * rows
    tables = tuple(_table(first, rows, width, bench.device) for width in sizes.row_bytes)
    found: dict[str, Any] = {}
    for name in ("collective", "symmetric") if bench.cuda else ("collective",):
        comm = bench.comm(name)
        for tokens in (sizes.tokens[0], sizes.tokens[-1], 0):
            count = sizes.columns * (tokens if tokens or not bench.rank else sizes.tokens[0])  # rank 0 wants none, too
            generator = bench.generator(bench.rank)
            ids = torch.randint(0, bench.world * rows, (count,), device=bench.device, generator=generator)
            ids[count // 2 :] = ids[: count - count // 2]
            before = comm.sent_bytes
            fetched = comm.fetch_rows(tables, ids, rows).wait()
            sent = comm.sent_bytes - before
            wanted = (_rows(ids, width) for width in sizes.row_bytes)
            right = bench.everywhere(all(torch.equal(a, b) for a, b in zip(fetched, wanted, strict=True)))
            row: dict[str, Any] = {"right": right, "bytes sent": sent}
            if tokens:
                row["ms"] = bench.time(lambda comm=comm, ids=ids: comm.fetch_rows(tables, ids, rows).wait())
            found[f"{name}, {tokens or 'no'} tokens{'' if tokens else ' on rank 0'}"] = row
    return found


def _rows(ids: Tensor, width: int) -> Tensor:
    """What lies in rows of a made-up table, uint8 `[N, width]`."""
    columns = torch.arange(width, device=ids.device)
    return ((ids[:, None] * 40503 + columns * 2654435761) >> 7).to(torch.uint8)


def _table(first: int, rows: int, width: int, device: torch.device) -> Tensor:
    table = torch.empty(rows, width, dtype=torch.uint8, device=device)
    for begin in range(0, rows, 1 << 17):
        end = min(rows, begin + (1 << 17))
        table[begin:end] = _rows(torch.arange(first + begin, first + end, device=device), width)
    return table


PARTS = {"correct": correct, "modules": modules, "engram": engram, "cost": cost, "step": fixed_step, "warm": warm}


def topology() -> str:
    """How the GPUs are linked."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, required=True)
    parser.add_argument("--layers", type=int, default=RELEASED.layers, help="of the fixed benchmark, that fit")
    parser.add_argument("--seconds", type=int, default=150, help="after which the run is ended")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(max(1, arguments.seconds - 3))
    signal.alarm(arguments.seconds)
    begin = time.monotonic()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    size = int(os.environ["WORLD_SIZE"])
    ranks = join(ParallelConfig(expert=size, data=size, timeout_seconds=2.0 * arguments.seconds))
    ranks.connect(device)
    sizes = replace(RELEASED, layers=arguments.layers) if device.type == "cuda" else TINY
    bench = Bench(device, sizes, ranks)
    bench.comm("collective")  # makes the process group of one rank
    bench.everywhere(True)
    print(f"the ranks have met, {time.monotonic() - begin:.0f} s", flush=True)
    record: dict[str, Any] = {
        "machine": machine(device).model_dump(mode="json"),
        "software": software().model_dump(mode="json"),
        "ranks": bench.world,
        "topology": topology(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if bench.cuda else "gloo",
        "sizes": vars(bench.sizes),
    }
    for name in arguments.parts:

        def keep(found: dict[str, Any], name: str = name) -> None:
            """Write what a part has found so far."""
            record[name] = found
            if bench.rank == 0:
                arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

        bench.keep = keep
        with torch.inference_mode(), ranks.together():
            keep(PARTS[name](bench))
        if bench.cuda:
            torch.cuda.empty_cache()  # others run on this device
        print(f"{name}, {time.monotonic() - begin:.0f} s", flush=True)
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
