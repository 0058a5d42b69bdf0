"""Communication: the article's shapes, and a table past 2^31 bytes."""

from __future__ import annotations

from dataclasses import replace

import torch

from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.recipes.comm import CommRecipe, identity_experts
from minideepinfer.testing.recipes.far import past_int32
from minideepinfer.testing.subject import Subject, difference
from minideepinfer.testing.tensors import same_bits


def article(subject: Subject) -> None:
    """Hidden 1030 there and back; tokens without any expert are NaN, and come home as zeros."""
    for dtype in subject.dtypes:
        for tokens in (1, 5, 300):
            for topk in (1, 4, 6):
                recipe = CommRecipe(tokens, dtype, hidden_size=1030, num_experts=8, topk=topk, seed=tokens + topk)
                case = recipe.build()
                ids = case.topk_ids.clone()
                ids[tokens // 2] = -1
                nowhere = (ids < 0).all(1)
                case = replace(case, topk_ids=ids, x=case.x.masked_fill(nowhere[:, None], torch.nan))
                case = subject.nearest([case])
                combined = subject.run(case)["combined"]
                expected = identity_experts(case.x, ids, case.topk_weights)
                if not same_bits(combined, expected):
                    raise Violation(f"{tokens} tokens with {topk} experts, {dtype}: {difference(combined, expected)}")


def far_rows(subject: Subject) -> None:
    """Rows past 2^31 bytes of a table are its own bytes."""
    recipe = CommRecipe(dtype=subject.dtypes[0], hidden_size=1030, rows=9, row_bytes=264, seed=4)
    case = subject.nearest([recipe.build()])
    table = past_int32(case.table, subject.device)
    first = len(table) - len(case.table)
    found = subject.run(replace(case, table=table, row_ids=case.row_ids + first))["rows"]
    expected = case.table[case.row_ids]
    if not same_bits(found, expected):
        raise Violation(f"rows past 2^31 bytes: {difference(found, expected)}")


LARGE = (
    ExplicitCase("article", "rows of a width that is no multiple of a tile; rows that nobody wants, read", article),
    ExplicitCase("64-bit-offsets", "offsets in 32 bits: a table past 2^31 bytes wraps around", far_rows),
)
