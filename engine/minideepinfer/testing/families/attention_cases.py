"""Attention: edge cases tried first, and cases A1 to A3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minideepinfer.operators import Selection
from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.families.whole_model import WHOLE_MODEL
from minideepinfer.testing.recipes.attention import AttentionCase, AttentionRecipe, fill_readable
from minideepinfer.testing.recipes.batch import GARBAGE, NAN, BatchRecipe
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import same_bits

DIMS = ((2, 64, 16), (2, 128, 64), (2, 512, 64), (16, 512, 64), (64, 512, 64))
"""Heads, head_dim and rope_dim that a case may run at, the wanted ones first."""

_THREE = BatchRecipe(seqlens=(3, 0, 2), context_lens=(12, 5, 0))

EDGES = (
    AttentionRecipe(),
    AttentionRecipe(BatchRecipe((1,), (0,))),
    AttentionRecipe(BatchRecipe((0, 0), (3, 0))),
    AttentionRecipe(BatchRecipe((2,), (30,)), compress_ratio=0, sliding_window=9),
    AttentionRecipe(BatchRecipe((1, 2), (8, 20), padding=(0,)), sink=1.0),
    AttentionRecipe(BatchRecipe((3,), (7,)), compress_ratio=2, pattern="newest", index_topk=5),
    AttentionRecipe(BatchRecipe((5,), (6,), page_tokens=8), compress_ratio=1, pattern="newest", index_topk=9),
    AttentionRecipe(_THREE, pattern="front", index_topk=9, sink=1.0, num_heads=3),
    AttentionRecipe(_THREE, pattern="behind", index_topk=9, with_lens=True),
    AttentionRecipe(_THREE, pattern="valid", compress_ratio=2, sink=30.0, num_heads=2),
    AttentionRecipe(_THREE, pattern="none", sink=1.0),
    AttentionRecipe(_THREE, pattern="one", index_topk=5, sliding_window=1, q_amplitude=4.0),
    AttentionRecipe(BatchRecipe((4,), (40,), window_start=(45,)), pattern="front", index_topk=9),
    AttentionRecipe(BatchRecipe((7,), (0,)), sliding_window=3, spare_slots=0, q_amplitude=4.0),
    AttentionRecipe(BatchRecipe((2, 1), (17, 33), decode=True), sliding_window=6, spare_slots=0, index_topk=9),
    AttentionRecipe(BatchRecipe((1, 2, 1), (7, 15, 8)), pattern="newest", index_topk=9),  # ends of pages
    AttentionRecipe(BatchRecipe((2, 3), (5, 8)), compress_ratio=2, pattern="valid", head_dim=33, index_topk=7),
    AttentionRecipe(BatchRecipe((4,), (40,), window_start=(45,)), pattern="none"),  # rows without keys, and no sink
    AttentionRecipe(_THREE, pattern="valid", q_amplitude=0.0, sink=1.0),  # all scores equal
    AttentionRecipe(_THREE, q_amplitude=1e-25, kv_amplitude=1e25, sink=1.0),
    AttentionRecipe(_THREE, pattern="valid", q_amplitude=1e4, num_heads=2),
    AttentionRecipe(_THREE, q_amplitude=1e37, kv_amplitude=1e-39, num_heads=2),  # subnormal keys
    AttentionRecipe(_THREE, q_amplitude=1e-39, sink=1.0),
    AttentionRecipe(_THREE, pattern="valid", head_dim=64, index_topk=9, sink=1.0, cache_layout="released"),
    AttentionRecipe(BatchRecipe((2,), (30,)), compress_ratio=0, sliding_window=9, cache_layout="released"),
    AttentionRecipe(BatchRecipe((3,), (7,)), compress_ratio=2, kv_amplitude=1e-3, cache_layout="released"),
)


def selected_only(
    indices: Sequence[Sequence[int]], num_entries: int, dims: tuple[int, int, int], dtype: str
) -> AttentionCase:
    """One request per row, which shows `num_entries` entries and has no window; memory that is not selected is NaN."""
    rows, (heads, head_dim, rope_dim) = len(indices), dims
    batch = BatchRecipe((1,) * rows, (num_entries - 1,) * rows, (num_entries,) * rows, page_tokens=64)
    recipe = AttentionRecipe(
        batch,
        dtype=dtype,
        num_heads=heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        index_topk=len(indices[0]),
        pattern="none",
        seed=11,
    )
    case = replace(recipe.build(), selection=Selection(torch.tensor(indices, dtype=torch.int32)))
    fill_readable(case, torch.Generator().manual_seed(12))
    return case


def _nearest(subject: Subject, indices: Sequence[Sequence[int]], num_entries: int, dtype: str) -> AttentionCase:
    return subject.nearest(selected_only(indices, num_entries, dims, dtype) for dims in DIMS)


def _heads(subject: Subject, case: AttentionCase) -> Tensor:
    """The operator's output, compared with the reference."""
    found = subject.run(case)
    subject.family.compare(subject, case, found, subject.reference(case), 1.0)
    return found["heads"]


def a1(subject: Subject) -> None:
    """48 invalid slots in front of four valid ones; and a row that has nothing."""
    for dtype in subject.dtypes:
        case = _nearest(subject, [[-1] * 48 + [5, 17, 40, 80] + [-1] * 12, [-1] * 64], 96, dtype)
        sink = torch.full((case.problem.num_heads,), 0.3)
        sink[1::2] = -0.2
        for chosen in (None, sink):
            for seed in range(3):
                order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(64)
                assert case.selection is not None
                indices = case.selection.indices[:, order]
                heads = _heads(subject, replace(case, sink=chosen, selection=Selection(indices)))
                if not bool((heads[1] == 0).all()) or bool((heads[0] == 0).all()):
                    raise Violation("row 1 has no key and must be zero, row 0 has four")


def a2(subject: Subject) -> None:
    """A row of NaN that selects nothing, padding or not, behind or in front, changes no bit of the real rows."""
    for dtype in subject.dtypes:
        rows = []
        for count in (1, 7, 20):
            front = (32 - count) // 2
            rows.append([-1] * front + list(range(3, 3 + count)) + [-1] * (32 - count - front))
        case = _nearest(subject, [*rows, [-1] * 32], 64, dtype)
        q = case.q.clone()
        q[3] = NAN
        case = replace(case, q=q)
        positions = case.batch.positions.clone()
        positions[3] = -1
        padded = replace(case, batch=replace(case.batch, positions=positions))
        alone = _heads(subject, case.take([0, 1, 2])[0])
        for with_nan in (padded, case):
            for order in ([0, 1, 2, 3], [3, 0, 1, 2]):
                _check_a2(_heads(subject, with_nan.take(order)[0]), order.index(3), alone)


def _check_a2(heads: Tensor, place: int, alone: Tensor) -> None:
    if not bool((heads[place] == 0).all()):
        raise Violation("the row without keys is not zero")
    if not same_bits(torch.cat([heads[:place], heads[place + 1 :]]), alone):
        raise Violation("the row without keys changes bits of the real rows")
    scale = heads.float().abs().amax() / 448.0
    if not bool(scale.isfinite()) or not torch.equal(scale, alone.float().abs().amax() / 448.0):
        raise Violation(f"the row without keys changes the FP8 scale of the output to {float(scale)}")


def a3(subject: Subject) -> None:
    """What lies past `lens` is left over from another call; an index that is not visible is invalid."""
    real = [3, 9, 11, 30, 49]
    lens = torch.tensor([5], dtype=torch.int32)
    for dtype in subject.dtypes:
        clean = _nearest(subject, [real + [-1] * 59], 50, dtype)
        expected = {"heads": _heads(subject, clean)}
        for rest in ([GARBAGE] * 59, [50, 53, -7] + [12] * 56, [0, GARBAGE, -1] + [-7] * 56):
            indices = torch.tensor([real + rest], dtype=torch.int32)
            found = subject.run(replace(clean, selection=Selection(indices, lens)))
            subject.agree(clean, found, expected, "with other values past lens", exact=subject.properties.deterministic)
        for row in (real + [GARBAGE] * 59, [*([50, -7] * 29), 53, *real]):
            found = subject.run(replace(clean, selection=Selection(torch.tensor([row], dtype=torch.int32))))
            subject.agree(clean, found, expected, "with indices that are not visible", exact=False)


CASES = (
    ExplicitCase("A1", "a first tile without any valid key: a running maximum of -inf minus -inf", a1),
    ExplicitCase("A2", "a padding row whose NaN reaches the real rows or their scale", a2),
    ExplicitCase("A3", "left-over values in a reused index buffer, read past `lens` or out of bounds", a3),
    *WHOLE_MODEL,
)
