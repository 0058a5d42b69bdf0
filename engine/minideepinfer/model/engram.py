"""Engram: hashed n-gram memory added to the residual streams (spec 3.9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.model.epilogue import Epilogue
from minideepinfer.model.weights import EngramWeights
from minideepinfer.operators import CommOperator, Phase
from minideepinfer.operators.results import checked
from minideepinfer.quantization import decode_fp8_rows


def engram_values(
    row_ids: Tensor, weights: EngramWeights, comm: CommOperator, dtype: torch.dtype, epilogue: Epilogue, phase: Phase
) -> Tensor:
    """Look rows up and project them; needs nothing of the streams, so it may run early.

    Args:
        row_ids: int64 `[T, columns]`.
        weights: table and projection.
        comm: fetches rows from wherever the table lies.
        dtype: compute dtype.
        epilogue: rounds the projection's input, where that is asked for.
        phase: of the rows.

    Returns:
        `[T, S + 1, H]`: a key for each stream, then the value.
    """
    ids = row_ids.flatten()
    codes, scales = (_fetched(table, ids, comm) for table in (weights.table, weights.table_scale))
    memory = decode_fp8_rows(codes, scales, dtype).view(*row_ids.shape, codes.shape[-1]).flatten(1)
    projected = F.linear(epilogue.activation(memory, phase), weights.wkv)
    streams, width = weights.gate_weight.shape
    return projected.view(len(row_ids), streams + 1, width)


def _fetched(table: Tensor, ids: Tensor, comm: CommOperator) -> Tensor:
    rows = comm.fetch_rows(table, ids)
    return checked(rows, (len(ids), table.shape[1]), table.dtype, ids.device, "the comm operator (fetch_rows)")
