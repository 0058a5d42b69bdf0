"""Engram: hashed n-gram memory added to the residual streams (spec 3.9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.errors import OperatorError
from minideepinfer.model.epilogue import Epilogue
from minideepinfer.model.weights import EngramWeights
from minideepinfer.operators import CommOperator, Pending, Phase
from minideepinfer.operators.results import checked
from minideepinfer.quantization import decode_fp8_rows

_FETCHER = "the comm operator (fetch_rows)"


def start_fetch(row_ids: Tensor, weights: EngramWeights, comm: CommOperator) -> Pending[tuple[Tensor, ...]]:
    """Send for table rows, wherever they lie; needs token ids only, so it is done before the first layer.

    Args:
        row_ids: int64 `[T, columns]`.
        weights: tables.
        comm: brings the rows.
    """
    return comm.fetch_rows((weights.table, weights.table_scale), row_ids.flatten(), weights.rows_per_rank)


def engram_values(
    row_ids: Tensor,
    fetched: Sequence[Tensor],
    weights: EngramWeights,
    dtype: torch.dtype,
    epilogue: Epilogue,
    phase: Phase,
) -> Tensor:
    """Decode and project fetched rows; needs nothing of the streams.

    Args:
        row_ids: int64 `[T, columns]`.
        fetched: what `start_fetch` brought.
        weights: projection.
        dtype: compute dtype.
        epilogue: rounds the projection's input, where that is asked for.
        phase: of the rows.

    Returns:
        `[T, S + 1, H]`: a key for each stream, then the value.

    Raises:
        OperatorError: what was fetched is not two tensors of `T * columns` rows.
    """
    tables = (weights.table, weights.table_scale)
    if not isinstance(fetched, (tuple, list)) or len(fetched) != len(tables):
        found = f"{len(fetched)} tensors" if isinstance(fetched, (tuple, list)) else type(fetched).__name__
        raise OperatorError(f"{_FETCHER} returned {found}; a tensor for each of {len(tables)} tables is needed")
    codes, scales = (
        checked(rows, (row_ids.numel(), table.shape[1]), table.dtype, row_ids.device, _FETCHER)
        for rows, table in zip(fetched, tables, strict=True)
    )
    memory = decode_fp8_rows(codes, scales, dtype).view(*row_ids.shape, codes.shape[-1]).flatten(1)
    projected = F.linear(epilogue.activation(memory, phase), weights.wkv)
    streams, width = weights.gate_weight.shape
    return projected.view(len(row_ids), streams + 1, width)
