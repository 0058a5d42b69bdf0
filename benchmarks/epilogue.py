"""`epilogue: fused` on one GPU beside naive and the floor, use by use, in one run.

    python benchmarks/epilogue.py --commit HASH [--out benchmarks/results/DATE-h200-epilogue.json]

Every use that the model makes of the family, at the released sizes in bfloat16. A floor is the bytes that must move
once, at this run's copy rate. `host us` is what a call costs in Python when nobody waits for the GPU. `differs` is the
share of numbers that are not naive's; without a norm it must be 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_timing import ceilings, facts, in_ms, time_calls, write_record
from minideepinfer.operators import BuildContext, EpilogueProblem, OperatorOptions, Phase, Quantization
from minideepinfer_epilogue import fused, naive

PAIRS, STREAMS, HIDDEN = 32, 4, 5120


def normal(*size: int) -> torch.Tensor:
    """The same float32 numbers for the same size, on the GPU."""
    return torch.randn(size, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0))


@dataclass(frozen=True)
class Use:
    """One call of a layer: channels, heads (0 = no such axis), tokens for a row, and what is done."""

    width: int
    heads: int = 0
    ratio: int = 1
    norm: bool = False
    rotate: bool = False
    quantization: Quantization = "none"
    in_place: bool = True

    def moved(self, tokens: int) -> int:
        """Bytes that a call must read and write."""
        only_rotates = self.rotate and self.in_place and not self.norm and self.quantization == "none"
        channels = 2 * PAIRS if only_rotates else self.width
        rows = tokens // self.ratio
        return rows * (4 * max(1, self.heads) * channels + 8 * PAIRS * self.rotate)

    def call(self, operator: Any, tokens: int) -> Callable[[], Any]:
        """The call; in place, it goes on from what it left."""
        rows = tokens // self.ratio
        shape = (rows, self.heads, self.width) if self.heads else (rows, self.width)
        x, weight, angles = normal(*shape).bfloat16(), 1 + normal(self.width) / 10, normal(rows, PAIRS) * 100
        norm = weight if self.norm else None
        cos, sin = (angles.cos(), angles.sin()) if self.rotate else (None, None)
        return lambda: operator.run(x, norm, cos, sin, self.quantization, self.in_place)


@dataclass(frozen=True)
class Inject:
    """Engram's gates: streams, keys and values of bfloat16."""

    def moved(self, tokens: int) -> int:
        """Bytes that a call must read and write."""
        return tokens * 2 * HIDDEN * (3 * STREAMS + 1) + 4 * STREAMS * HIDDEN

    def call(self, operator: Any, tokens: int) -> Callable[[], Any]:
        """The call."""
        streams, values = normal(tokens, STREAMS, HIDDEN).bfloat16(), normal(tokens, STREAMS + 1, HIDDEN).bfloat16()
        weight = 1 + normal(STREAMS, HIDDEN) / 10
        return lambda: operator.inject(streams, values, weight)


USES: dict[str, Use | Inject] = {
    "qr: norm": Use(1280, norm=True),
    "q: rotate": Use(512, heads=64, rotate=True),
    "window: norm, rotate, fp8": Use(512, norm=True, rotate=True, quantization="fp8"),
    "index query: rotate, mxfp4": Use(128, heads=32, rotate=True, quantization="mxfp4"),
    "latent: norm": Use(512, ratio=2, norm=True),
    "main entry: rotate, nvfp4": Use(512, ratio=2, rotate=True, quantization="nvfp4"),
    "index key: norm, rotate, mxfp4": Use(128, ratio=2, norm=True, rotate=True, quantization="mxfp4"),
    "hidden: fp8": Use(5120, quantization="fp8", in_place=False),
    "output: fp8": Use(8192, quantization="fp8"),
    "final: norm": Use(5120, norm=True),
    "engram: inject": Inject(),
}


def host_us(call: Callable[[], Any], repeats: int = 100) -> float:
    """Microseconds of Python for a call."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * spent / repeats


def measure(tokens: int, rates: dict[str, float]) -> dict[str, Any]:
    """Times, floors and differences of all uses."""
    problem = EpilogueProblem(
        phase=Phase.PREFILL,
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        kv_quantization="released",
        activation_quantization="released",
        widths=(128, 512, 1280, 5120, 8192),
        rope_dim=2 * PAIRS,
        rms_norm_eps=1e-20,
    )
    context = BuildContext(problem, OperatorOptions(), torch.device("cuda"))
    operators = {"fused": fused.build(context), "naive": naive.build(context)}
    differs, host, calls = {}, {}, {}
    for name, use in USES.items():
        results = []
        for kind, operator in operators.items():
            call = use.call(operator, tokens)
            results.append(call().clone())
            calls[f"{kind} {name}"] = call
            host[f"{kind} {name}"] = round(host_us(call), 1)
        differs[name] = float((results[0] != results[1]).float().mean())
    times = time_calls(calls, repeats=12, warmup=1)
    floors = {name: use.moved(tokens) / rates["copy_tb_s"] / 1e9 for name, use in USES.items()}
    return {
        "tokens": tokens,
        "floor_ms": floors,
        "over_floor": {name: times[f"fused {name}"].median / floor for name, floor in floors.items()},
        "naive_over_fused": {n: times[f"naive {n}"].median / times[f"fused {n}"].median for n in USES},
        "differs": differs,
        "host_us": host,
        "ms": in_ms(times),
    }


def main() -> None:
    """Measure, print and, if asked, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096])
    arguments = parser.parse_args()
    before = ceilings()
    results = [measure(tokens, before) for tokens in arguments.tokens]
    for result in results:
        print(f"T = {result['tokens']}: ms fused, naive, floor; host us fused, naive; differs")
        for name in USES:
            ms, host = ([result[key][f"{kind} {name}"] for kind in ("fused", "naive")] for key in ("ms", "host_us"))
            medians = " ".join(f"{each[1]:8.4f}" for each in ms)
            print(f"{name:32s} {medians} {result['floor_ms'][name]:8.4f} {host} {result['differs'][name]:.2g}")
    if arguments.out is not None:
        record = {
            "facts": facts(arguments.commit),
            "ceilings_before": before,
            "ceilings_after": ceilings(),
            "results": results,
        }
        write_record(arguments.out, record)


if __name__ == "__main__":
    main()
