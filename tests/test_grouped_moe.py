"""The grouped products of `moe: fused`: order of weights, instructions that decode them, twin of the kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from minideepinfer.quantization import decode_mxfp4, qdq_fp8
from minideepinfer.testing.recipes.batch import context
from minideepinfer.testing.recipes.moe import MoeRecipe, random_experts
from minideepinfer.testing.tensors import same_bits
from minideepinfer_comm.single import SingleComm
from minideepinfer_moe import fused, naive
from minideepinfer_moe.grouped import GroupedProducts
from minideepinfer_moe.grouped_launch import SHAPES, Shape
from minideepinfer_moe.grouped_pack import LARGEST_EXPONENT, WIDEST_ROW, GroupedExperts, GroupedMatrix, pack_grouped
from minideepinfer_moe.grouped_rows import encode_rows
from minideepinfer_moe.kernels.grouped import SIZES as kernel_sizes
from minideepinfer_moe.kernels.grouped_assembly import bf16_assembly, fp8_assembly
from minideepinfer_moe.products import Exponents, choose, measure
from minideepinfer_moe.schedule import make_schedule
from torch import Tensor

GENERATOR = torch.Generator().manual_seed(0)


def _bf16(bits: int) -> float:
    return float(torch.tensor(bits << 16, dtype=torch.int64).to(torch.int32).view(torch.float32))


def _execute(assembly: str, registers: dict[str, int]) -> None:
    """PTX of the few kinds that decoding needs, on unsigned 32-bit registers."""

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    def product(a: int, b: int) -> int:
        halves = (torch.tensor(_bf16(a >> s & 0xFFFF) * _bf16(b >> s & 0xFFFF)).bfloat16() for s in (0, 16))
        low, high = (int(half.view(torch.int16)) & 0xFFFF for half in halves)
        return low | high << 16

    def permute(a: int, b: int, selector: int) -> int:
        data = (a | b << 32).to_bytes(8, "little")
        assert not selector & 0x8888
        return int.from_bytes(bytes(data[selector >> 4 * i & 7] for i in range(4)), "little")

    def merge(a: int, b: int, c: int, table: int) -> int:
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))

    kinds = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, n: a << n,
        "shr.u32": lambda a, n: a >> n,
        "bfe.u32": lambda a, first, n: a >> first & (1 << n) - 1,
        "mad.lo.u32": lambda a, b, c: a * b + c,
        "mul.rn.bf16x2": product,
        "prmt.b32": permute,
        "lop3.b32": merge,
    }
    for instruction in re.sub(r"[{}]|\.reg[^;]*;", "", assembly).split(";"):
        if instruction.strip():
            kind, operands = instruction.strip().split(maxsplit=1)
            target, *sources = (operand.strip() for operand in operands.split(","))
            registers[target] = kinds[kind](*map(value, sources)) & 0xFFFFFFFF


def _decoded(matrix: GroupedMatrix, fp8: bool) -> Tensor:
    """The first block of the first expert, decoded by the assembly: float32 `[128, columns of a stage]`."""
    groups = 4 if fp8 else 2
    weights = torch.zeros(8, 2, 8, 32 * groups)  # warp, r8, row, column
    words, exponents = matrix.words[0, 0, 0].flatten(2), matrix.exponents[0, 0, 0]
    for warp in range(0, 8, 3):
        for row in range(8):
            for quarter in range(4):
                own = words[warp, row].view(4, groups, 2)[quarter].flatten().tolist()
                scales = [
                    int.from_bytes(bytes(e), "little") for e in exponents[warp, row].flatten().view(-1, 4).tolist()
                ]
                for half in range(2):
                    part = own[half * groups : (half + 1) * groups]
                    inputs = [w & 0xFFFFFFFF for w in part] + [scales[half if fp8 else 0]] * groups
                    registers = {f"${8 + i}": word for i, word in enumerate(inputs)}
                    _execute(fp8_assembly() if fp8 else bf16_assembly(half), registers)
                    for i in range(8):
                        bits = registers[f"${i}"]
                        if fp8:  # group, r8, k16
                            code = torch.tensor(list(bits.to_bytes(4, "little")), dtype=torch.uint8)
                            column = 64 * half + 32 * (i >> 2) + 16 * (i & 1) + 4 * quarter
                            weights[warp, i >> 1 & 1, row, column : column + 4] = code.view(torch.float8_e4m3fn).float()
                        else:  # r8, k16, k8
                            column = 32 * half + 8 * (i & 3) + 2 * quarter
                            pair = torch.tensor([_bf16(bits & 0xFFFF), _bf16(bits >> 16)])
                            weights[warp, i >> 2, row, column : column + 2] = pair
    return weights.transpose(1, 2).reshape(128, -1)


@pytest.mark.parametrize("fp8", [False, True])
def test_the_assembly_decodes_what_was_packed_bit_by_bit(fp8: bool) -> None:
    experts = random_experts(1, 128, 128, GENERATOR)
    low, high = (114, 126) if fp8 else (0, 129)  # random exponents as far apart as fits
    scale = torch.randint(low, high, (1, 128, 4), generator=GENERATOR, dtype=torch.uint8)
    experts = replace(experts, w2_scale=scale)
    exponents = measure(experts)
    assert exponents.widest <= WIDEST_ROW if fp8 else exponents.largest <= LARGEST_EXPONENT
    matrix = pack_grouped(experts, fp8).w2
    weights = _decoded(matrix, fp8)
    if fp8:
        weights *= matrix.row_scales[0][:, None]
    expected = decode_mxfp4(experts.w2[0], scale[0], torch.float32)[:, : weights.shape[1]]
    rows = torch.arange(128) // 16 % 3 == 0
    assert same_bits(weights[rows], expected[rows].bfloat16().float())


def test_exponents_are_measured_by_row() -> None:
    experts = random_experts(2, 128, 128, GENERATOR)
    scales = torch.full((2, 2, 128, 4), 100, dtype=torch.uint8), torch.full((2, 128, 4), 120, dtype=torch.uint8)
    for w13_change, w2_change, expected in (
        (100, 120, (120, 0)),
        (103, 255, (255, 135)),
        (90, 121, (121, 10)),
        (0, 119, (120, 100)),
    ):
        scales[0][1, 1, 7, 2], scales[1][0, 5, 3] = w13_change, w2_change
        assert measure(replace(experts, w13_scale=scales[0], w2_scale=scales[1])) == Exponents(*expected)


@pytest.mark.parametrize(
    ("quantization", "largest", "widest", "expected"),
    [
        ("released", 131, 11, "fp8"),
        ("released", 128, 12, "bf16"),
        ("released", 129, 12, "plain"),
        ("released", 255, 0, "plain"),
        ("none", 128, 11, "bf16"),
        ("none", 129, 0, "plain"),
    ],
)
def test_products_are_chosen_by_what_they_decode(quantization: str, largest: int, widest: int, expected: str) -> None:
    case = MoeRecipe(2, "bfloat16", quantization, 128, 128).build()
    products = choose(case.problem, Exponents(largest, widest))
    packed = products.pack(case.weights.experts)
    found = ("fp8" if packed.fp8 else "bf16") if isinstance(packed, GroupedExperts) else "plain"
    assert found == expected
    assert not isinstance(choose(replace(case.problem, hidden_size=96), Exponents(100, 0)), GroupedProducts)


def test_encoded_rows_are_the_quantised_ones() -> None:
    powers = torch.randint(-12, 4, (16, 96), generator=GENERATOR).float().exp2().repeat_interleave(32, 1)
    x = (torch.randn(16, 3072, generator=GENERATOR) * powers).bfloat16()
    x[3] = 0.0
    schedule = make_schedule(torch.zeros(15, 1, dtype=torch.int32), torch.ones(15, 1), 0, 1, 16)
    codes, scales = encode_rows(x[:15], schedule, sort=False)
    expected = qdq_fp8(x[:15]).float()
    decoded = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    error = (decoded - expected).abs()
    assert (error <= scales[:, None] * 2.0**-10).all()
    exact = expected.abs() >= scales[:, None] * 2.0**-6
    assert exact.any() and not error[exact].any()
    assert same_bits(scales.log2().frac(), torch.zeros(15))


@pytest.mark.parametrize("quantization", ["none", "released"])
@pytest.mark.parametrize("routing", ["any", "one", "none"])
def test_the_twin_computes_the_naive_sum(quantization: str, routing: str) -> None:
    recipe = MoeRecipe(
        tokens=40, dtype="bfloat16", activation_quantization=quantization, hidden_size=256, intermediate_size=128,
        num_experts=6, num_local_experts=4, expert_start=1, topk=2, routing=routing, seed=3,
    )  # fmt: skip
    case = recipe.build()
    operator = fused.build(context(case.problem))
    assert isinstance(operator.transform_weights(case.weights).products, GroupedProducts)
    y, expected = (case.run(o, SingleComm()).float() for o in (operator, naive.build(context(case.problem))))
    assert torch.isfinite(y[case.local_rows()]).all()
    difference = (y - expected)[case.local_rows()].norm()
    assert difference <= 6e-3 * expected[case.local_rows()].norm()
    assert not y[~case.local_rows()].any()


@pytest.mark.parametrize("quantization", ["none", "released"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_does_not_become_a_number(value: float, quantization: str) -> None:
    recipe = MoeRecipe(3, "bfloat16", quantization, 128, 128, 3, 3, topk=2, routing="one")
    case = recipe.build()
    operator = fused.build(context(case.problem))
    right = case.run(operator, SingleComm())
    case.x[1, 3] = value
    wrong = case.run(operator, SingleComm())
    assert wrong[1].isnan().all() and right.isfinite().all()
    assert same_bits(wrong[[0, 2]], right[[0, 2]])
    assert case.run(naive.build(context(case.problem)), SingleComm())[1].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_of_rows_has_a_tile_size(shape: Shape) -> None:
    """A tile that no size takes would be copied and never multiplied: the kernel would wait for ever."""
    sizes = [sum(size) for i, size in enumerate(kernel_sizes) if shape.tiles >> i & 1]
    assert max(sizes) == shape.tile_rows and shape.tile_rows % shape.box == 0
    assert SHAPES[-1].average == float("inf")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from minideepinfer_moe.grouped_launch import SHAPES
from minideepinfer_moe.kernels.grouped import grouped_kernel as kernel

def boxes(dtype, shape, swizzle, bits):
    return f"tensordesc<{dtype}{shape},{gl.NVMMASharedLayout(swizzle, bits, 2)!r}>"

shape = SHAPES[0]
types = {"x": boxes("bf16", [shape.box, 64], 128, 16), "limit": "fp32", "out": "*bf16"}
types |= {"words": boxes("i32", [4, 256], 0, 32), "exponents": boxes("i32", [1, 64], 0, 32)}
types |= {name: "*fp32" for name in ("row_weights", "x_scales", "w_scales")}
types |= {name: "*i32" for name in ("tiles", "num_tiles")} | {name: "i32" for name in ("steps", "blocks")}
values = {"OUT_WIDTH": 2304, "ROWS": shape.tile_rows, "BOX": shape.box, "TILES": shape.tiles, "STAGES": 4, "UP": True}
values["FP8"] = False
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
source = GluonASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
options = {"num_warps": 8, "maxnreg": shape.registers}
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"):
    assert instruction in compiled.asm["ptx"], instruction
# Triton 3.6 puts the sum of a reduction where partitions are handed their arguments, and does not order the two.
assert "tt.reduce" not in compiled.asm["ttgir"]
"""


def test_the_kernel_compiles_for_hopper() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
