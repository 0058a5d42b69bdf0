"""The world of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from minideepinfer.operators import CommProblem
from minideepinfer.testing.recipes.batch import context, facts
from minideepinfer_comm.single import build

COMM = build(context(CommProblem(**facts(torch.float32), hidden_size=1030, num_experts=8, world_size=1)))


def test_it_is_rank_0_of_1() -> None:
    assert (COMM.rank, COMM.world_size) == (0, 1)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_everything_is_already_home(tokens: int) -> None:
    x = torch.randn(tokens, 1030)
    ids, weights = torch.zeros(tokens, 2, dtype=torch.int32), torch.rand(tokens, 2)
    assert torch.equal(COMM.all_gather(x, [tokens]), x)
    assert torch.equal(COMM.reduce_scatter(x, [tokens]), x)
    dispatched = COMM.prepare([tokens]).dispatch(x, ids, weights).wait()
    assert torch.equal(dispatched.x, x)
    assert torch.equal(dispatched.topk_ids, ids)
    assert torch.equal(dispatched.topk_weights, weights)
    assert torch.equal(COMM.combine(dispatched.x, dispatched.handle).wait(), x)


@pytest.mark.parametrize("ids", [[], [2], [6, 0, 6, 3]])
def test_rows_come_from_memory_or_from_a_mapped_file(ids: list[int], tmp_path: Path) -> None:
    table = torch.arange(7 * 5, dtype=torch.uint8).view(7, 5)
    table.numpy().tofile(tmp_path / "table")
    mapped = torch.from_numpy(np.memmap(tmp_path / "table", dtype=np.uint8, mode="r+", shape=(7, 5)))
    row_ids = torch.tensor(ids, dtype=torch.int64)
    for source in (table, mapped):
        for rows in COMM.fetch_rows([source, source], row_ids, 7).wait():
            assert rows.shape == (len(ids), 5)
            assert rows.tolist() == [table[i].tolist() for i in ids]
