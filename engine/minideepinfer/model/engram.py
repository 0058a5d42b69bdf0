"""Engram: hashed n-gram memory added to the residual streams (spec 3.9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.config import TextConfig
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
    streams, width = weights.q_weight.shape
    return projected.view(len(row_ids), streams + 1, width)


def _fetched(table: Tensor, ids: Tensor, comm: CommOperator) -> Tensor:
    rows = comm.fetch_rows(table, ids)
    return checked(rows, (len(ids), table.shape[1]), table.dtype, ids.device, "the comm operator (fetch_rows)")


def inject(streams: Tensor, values: Tensor, weights: EngramWeights, config: TextConfig) -> Tensor:
    """Add the gated value to every stream.

    Args:
        streams: `[T, S, H]`.
        values: `[T, S + 1, H]` of `engram_values`.
        weights: for the per-channel weights of the gate.
        config: for the epsilon.
    """
    x, keys, value = streams.float(), values[:, :-1].float(), values[:, -1:].float()
    eps, width = config.rms_norm_eps, streams.shape[-1]
    dot = (x * (weights.q_weight * weights.k_weight) * keys).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps) * width**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    return (x + gate.unsqueeze(-1) * value).to(streams.dtype)
