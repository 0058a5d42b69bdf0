"""The Gluon kernel, which no interpreter runs, compiles for Hopper on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from minideepinfer_attention.kernels.gluon import sparse_prefill_kernel as kernel

tables = {name: "*bf16" for name in ("q", "window", "pool", "out")}
rows = {name: "*i32" for name in ("window_rows", "pool_rows")}
floats = {name: "*fp32" for name in ("sink", "cos", "sin")}
numbers = {"num_tokens": "i32", "num_selected": "i32", "scale": "fp32"}
types = {**tables, **rows, **floats, **numbers}
signature = {name: types[name] for name in kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name not in numbers}
source = GluonASTSource(fn=kernel, signature=signature, constexprs={}, attrs=aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
assert compiled.metadata.shared <= 232448, compiled.metadata.shared
for instruction in ("wgmma.mma_async", "cp.async.cg.shared.global", "setmaxnreg"):
    assert instruction in compiled.asm["ptx"], instruction
"""


def test_the_sparse_kernel_compiles_for_hopper() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
