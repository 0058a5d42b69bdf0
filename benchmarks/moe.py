"""`moe: fused` on one GPU as one rank of four: parts and whole beside naive, cuBLAS products and the floor, in one run.

    python benchmarks/moe.py --commit HASH [--out benchmarks/results/DATE-h200-moe.json]

Random routing over 384 experts, 96 of them local. T tokens are those that reach this rank: 16384 = 4 x 4096 of a
prefill step, 512 = 4 x 128 of the decoder's tail, 1 to 64 = decode. The floor of the products is the larger of their
arithmetic at this run's cuBLAS rate (of bfloat16, or of FP8 where activations are quantised) and of the packed weights
of the experts touched at this run's copy rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import ceilings, facts, graphed, in_ms, time_calls, write_record
from minideepinfer.operators import BuildContext, MoeProblem, MoeWeights, OperatorOptions, PackedExperts, SharedExpert
from minideepinfer.operators.declaration import Phase
from minideepinfer_comm.single import SingleComm
from minideepinfer_moe import fused, naive
from minideepinfer_moe.gate import gate_logits, select
from minideepinfer_moe.rows import combine, quantize, shared_expert
from torch import Tensor

HIDDEN, INNER, EXPERTS, LOCAL, TOPK = 5120, 2304, 384, 96, 6
EXPERT_BYTES = 3 * HIDDEN * INNER // 2 * 17 // 16
"""Codes and exponents of one expert."""


def problem(quantization: str) -> MoeProblem:
    """The release's MoE on one rank of four."""
    return MoeProblem(
        phase=Phase.PREFILL,
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        kv_quantization="none",
        activation_quantization=quantization,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_experts=EXPERTS,
        num_local_experts=LOCAL,
        topk=TOPK,
        num_shared_experts=1,
        routed_scaling=1.5,
        swiglu_limit=10.0,
        world_size=1,
    )


def random_weights() -> MoeWeights:
    """Random codes, exponents that keep values around 1, and a gate without favourites."""

    def byte(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, device="cuda") / columns**0.5).bfloat16()

    experts = PackedExperts(
        byte(0, 256, LOCAL, 2, INNER, HIDDEN // 2),
        byte(115, 120, LOCAL, 2, INNER, HIDDEN // 32),
        byte(0, 256, LOCAL, HIDDEN, INNER // 2),
        byte(115, 120, LOCAL, HIDDEN, INNER // 32),
        expert_start=LOCAL,
    )
    shared = SharedExpert(matrix(INNER, HIDDEN), matrix(INNER, HIDDEN), matrix(HIDDEN, INNER))
    return MoeWeights(matrix(EXPERTS, HIDDEN), torch.zeros(EXPERTS, device="cuda"), experts, shared)


def random_routing(tokens: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, all equally likely."""
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOPK, dim=1).indices.sort(1).values
    return ids.int(), torch.rand(tokens, TOPK, device="cuda")


def measure(tokens: int, weights: MoeWeights, rates: dict[str, float], quantization: str) -> dict[str, Any]:
    """Times in ms of one number of tokens, and what bounds the products."""
    context = BuildContext(problem(quantization), OperatorOptions(), torch.device("cuda"))
    operator, reference, comm = fused.build(context), naive.build(context), SingleComm()
    packed = operator.transform_weights(weights)
    x, (ids, topk_weights) = torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), random_routing(tokens)
    quantized = quantization == "released"
    schedule = operator.schedule((ids, topk_weights), packed, x.dtype)
    products = packed.products
    r = products.gate_up(x, packed.experts, schedule, schedule.row_weights, 10.0, quantized)
    y = products.down(r, packed.experts, schedule)
    rows = int(schedule.expert_offsets[-1])
    touched = int((schedule.expert_offsets.diff() > 0).sum())
    logits = gate_logits(x, packed.gate)
    w13, w2 = packed.shared_w13, packed.shared_w2
    assert w13 is not None and w2 is not None
    dense_x, dense_r = x.new_zeros(rows, HIDDEN).normal_(), x.new_zeros(rows, INNER).normal_()
    parts: dict[str, Callable[[], Any]] = {
        "gate": lambda: operator.route(x, packed),
        "gate: selection": lambda: select(logits, packed.gate_bias, TOPK, 1.5),
        "schedule": lambda: operator.schedule((ids, topk_weights), packed, x.dtype),
        "gate_up": lambda: products.gate_up(x, packed.experts, schedule, schedule.row_weights, 10.0, quantized),
        "down": lambda: products.down(r, packed.experts, schedule),
        "combine": lambda: combine(y, schedule, None, torch.bfloat16),
        "combine with shared": lambda: combine(y, schedule, x, torch.bfloat16),
        "shared expert": lambda: shared_expert(x, w13, w2, 10.0, quantized),
        "quantize": lambda: quantize(x),
        "cuBLAS, one dense expert, gate_up": lambda: dense_x @ w13.t(),
        "cuBLAS, one dense expert, down": lambda: dense_r @ w2.t(),
        "fused": lambda: operator.run(x, packed, comm, None),
    }
    calls = {name: graphed(call) for name, call in parts.items()}
    calls["fused, eager"] = parts["fused"]
    times = time_calls(calls, repeats=9, warmup=1)
    times |= time_calls({"naive, eager": lambda: reference.run(x, weights, comm, None)}, repeats=3, warmup=1)
    flops = 2 * 3 * rows * HIDDEN * INNER
    floor = (
        max(flops / rates["fp8_tflops" if quantized else "bf16_tflops"], touched * EXPERT_BYTES / rates["copy_tb_s"])
        / 1e9
    )
    return {
        "tokens": tokens,
        "activation_quantization": quantization,
        "local_rows": rows,
        "experts_touched": touched,
        "floor_of_products_ms": floor,
        "products_over_floor": (times["gate_up"].median + times["down"].median) / floor,
        "naive_over_fused": times["naive, eager"].median / times["fused"].median,
        "ms": in_ms(times),
    }


def main() -> None:
    """Measure, print and, if asked, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 4096, 16384])
    parser.add_argument("--quantization", nargs="+", default=["none", "released"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    weights, before = random_weights(), ceilings()
    results = [measure(t, weights, before, q) for q in arguments.quantization for t in arguments.tokens]
    for result in results:
        head = {name: value for name, value in result.items() if name != "ms"}
        print(head, *(f"  {name:36s} {t[1]:8.4f} ms" for name, t in result["ms"].items()), sep="\n", flush=True)
    record = {
        "what": "moe: fused as one rank of four; low, median, high in ms, L2 cold, all calls of a size in turn; "
        "replayed from CUDA graphs unless eager",
        **facts(arguments.commit),
        "ceilings": {"before": before, "after": ceilings()},
        "results": results,
    }
    if arguments.out:
        write_record(arguments.out, record)


if __name__ == "__main__":
    main()
