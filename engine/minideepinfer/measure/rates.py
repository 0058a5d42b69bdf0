"""What this machine reaches now: the rates that floors are computed from, measured in the run that uses them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minideepinfer.measure.timing import Call, time_calls

COPY = "copy_tb_s"
FP8_CAPABILITY = (8, 9)
"""The first that multiplies fp8."""


def measured_rates(device: torch.device) -> dict[str, float]:
    """Rates of a device, of torch's own copy and matrix products.

    Args:
        device: a CPU or a GPU; a GPU needs 3 GiB.

    Returns:
        `copy_tb_s`, bytes read and written by a large copy; `float32_tflops` (no tf32), and on a GPU `bf16_tflops` and,
        where it multiplies fp8, `fp8_tflops`.
    """
    if device.type != "cuda":
        return _measure(device, copy_bytes=64 << 20, products={"float32_tflops": _product(1024, torch.float32, device)})
    products = {
        "float32_tflops": _product(4096, torch.float32, device),
        "bf16_tflops": _product(8192, torch.bfloat16, device),
    }
    if torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        products["fp8_tflops"] = _fp8_product(8192, device)
    return _measure(device, copy_bytes=1 << 30, products=products)


def tflops(rates: Mapping[str, float], arithmetic: str) -> float:
    """The rate of products in `float32`, `bf16` or `fp8`; a machine that lacks one has the next wider one's."""
    wider = ("fp8", "bf16", "float32")
    return next(rates[f"{name}_tflops"] for name in wider[wider.index(arithmetic) :] if f"{name}_tflops" in rates)


def _measure(device: torch.device, copy_bytes: int, products: dict[str, tuple[Call, int]]) -> dict[str, float]:
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).fill_(3)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {COPY: lambda: target.copy_(source)}
    calls |= {name: call for name, (call, _) in products.items()}
    work = {COPY: 2 * copy_bytes} | {name: 2 * size**3 for name, (_, size) in products.items()}
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        times = time_calls(calls, device, repeats=10 if device.type == "cuda" else 5, warmup=2)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return {name: work[name] / times[name].median / 1e9 for name in calls}


def _product(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Call, int]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), size


def _fp8_product(size: int, device: torch.device) -> tuple[Call, int]:
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    b, one = a.t().contiguous().t(), torch.ones((), device=device)

    def multiply() -> Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return multiply, size
