"""`residual: fused` on one GPU beside naive, a cuBLAS product and the floor, with its errors, in one run.

    python benchmarks/residual.py --commit HASH [--out benchmarks/results/DATE-h200-residual.json]

The released sizes: 4 streams of 5120 channels in bfloat16, 20 Sinkhorn iterations. A floor is the bytes that must move
once, at this run's copy rate. Errors are norm(difference) / norm(truth) against float64 on the streams that were given,
or that the operator itself returned. The cuBLAS product is the projection alone, of the same two bfloat16 parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import ceilings, facts, in_ms, time_calls, write_record
from minideepinfer.operators import (
    BuildContext,
    Coefficients,
    HyperConnectionWeights,
    OperatorOptions,
    Phase,
    ResidualProblem,
)
from minideepinfer.testing import residual_bounds
from minideepinfer_residual import fused, naive
from torch import Tensor

STREAMS, HIDDEN = 4, 5120
COLUMNS = STREAMS * (2 + STREAMS)
ROW_BYTES = 2 * HIDDEN
"""One row of one stream."""
MOVED = {"enter": STREAMS + 1, "advance": 2 * STREAMS + 2, "mix": 2 * STREAMS + 1, "collapse and norm": STREAMS + 1}
"""Rows of a stream that a call must read or write, for each token."""


def problem(tokens: int) -> ResidualProblem:
    """The release's; few tokens are decode rows."""
    return ResidualProblem(
        phase=Phase.DECODE if tokens <= 64 else Phase.PREFILL,
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        kv_quantization="none",
        activation_quantization="none",
        num_streams=STREAMS,
        hidden_size=HIDDEN,
        sinkhorn_iterations=20,
        rms_norm_eps=1e-20,
        hc_eps=1e-6,
    )


def normal(*shape: int) -> Tensor:
    """float32 on the GPU."""
    return torch.randn(shape, device="cuda")


def error(found: Tensor, truth: Tensor) -> float:
    """Relative, in the L2 norm."""
    return float((found.cpu().double() - truth).norm() / truth.norm())


def measure(tokens: int, rates: dict[str, float]) -> dict[str, Any]:
    """Times in ms, floors and errors of one number of tokens."""
    context = BuildContext(problem(tokens), OperatorOptions(), torch.device("cuda"))
    operator, reference = fused.build(context), naive.build(context)
    streams, output = normal(tokens, STREAMS, HIDDEN).bfloat16(), normal(tokens, HIDDEN).bfloat16()
    pre, norm = normal(tokens, STREAMS).sigmoid(), 1 + normal(HIDDEN) / 10
    comb = normal(tokens, STREAMS, STREAMS).softmax(1)
    site = Coefficients(pre, 2 * normal(tokens, STREAMS).sigmoid(), comb)
    fn = normal(COLUMNS, STREAMS * HIDDEN) / (STREAMS * HIDDEN) ** 0.5
    raw = HyperConnectionWeights(fn, normal(COLUMNS), torch.tensor([0.7, 1.3, 2.0], device="cuda"))
    weights = operator.transform_weights(raw)
    dense, squares = weights.fn[:, : 2 * COLUMNS].contiguous(), normal(tokens)
    calls: dict[str, Callable[[], Any]] = {
        "enter": lambda: operator.enter(streams, pre, weights, norm),
        "advance": lambda: operator.advance(streams, output, site, weights, norm),
        "mix": lambda: operator.mix(streams, output, site),
        "collapse and norm": lambda: operator.collapse(streams, pre, norm),
        "coefficients alone": lambda: operator._coefficients(streams, squares, weights),
        "cuBLAS, projection alone": lambda: streams.flatten(1) @ dense,
        "copy of the streams": lambda: streams.clone(),
        "naive enter": lambda: reference.enter(streams, pre, raw, norm),
        "naive advance": lambda: reference.advance(streams, output, site, raw, norm),
        "naive mix": lambda: reference.mix(streams, output, site),
    }
    times = time_calls(calls, repeats=20 if tokens < 4096 else 12, warmup=2)
    floors = {name: rows * tokens * ROW_BYTES / rates["copy_tb_s"] / 1e9 for name, rows in MOVED.items()}
    return {
        "tokens": tokens,
        "floor_ms": floors,
        "over_floor": {name: times[name].median / floor for name, floor in floors.items()},
        "naive_over_fused": {n: times[f"naive {n}"].median / times[n].median for n in ("enter", "advance", "mix")},
        "error": errors(operator.advance(streams, output, site, weights, norm), (streams, output, site), raw, norm),
        "ms": in_ms(times),
    }


def errors(
    entered: Any, given: tuple[Tensor, Tensor, Coefficients], raw: HyperConnectionWeights, norm: Tensor
) -> dict[str, float]:
    """Of an advance, on at most 256 rows; streams and x hold one rounding to bfloat16 (about 1.7e-3)."""
    some = slice(0, 256)
    streams, output, site = given
    site = Coefficients(site.pre[some].cpu(), site.post[some].cpu(), site.comb[some].cpu())
    left = entered.streams[some].cpu()
    truth = residual_bounds.mixed(streams[some].cpu(), output[some].cpu(), site, torch.bfloat16)
    x = residual_bounds.collapsed(left, site.pre, norm.cpu(), 1e-20, torch.bfloat16)
    raw = HyperConnectionWeights(raw.fn.cpu(), raw.base.cpu(), raw.scale.cpu())
    next_site = residual_bounds.site(left, raw, problem(len(left)), torch.bfloat16)
    found = {"streams": error(left, truth.value), "x": error(entered.x[some], x.value)}
    for name in ("pre", "post", "comb"):
        found[name] = error(getattr(entered.site, name)[some], getattr(next_site, name).value)
    return found


def main() -> None:
    """Measure, print and, if asked, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 4096])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    before = ceilings()
    results = [measure(tokens, before) for tokens in arguments.tokens]
    for result in results:
        head = {name: value for name, value in result.items() if name != "ms"}
        print(head, *(f"  {name:26s} {t[1]:8.4f} ms" for name, t in result["ms"].items()), sep="\n", flush=True)
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
