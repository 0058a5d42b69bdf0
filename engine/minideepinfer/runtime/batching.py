"""Turning scheduled requests into the packed rows of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minideepinfer.config import TextConfig
from minideepinfer.model.engram_hash import EngramHash
from minideepinfer.model.rows import Rows
from minideepinfer.model.step import Narrowing, Step
from minideepinfer.operators import Phase
from minideepinfer.runtime.replay import tail_rows
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.transfer import upload


@dataclass(frozen=True, eq=False)
class Part:
    """What one request contributes to a step: rows at positions `start .. end - 1`, of which `kept ..` reach the head.

    Attributes:
        request: the request.
        phase: of its rows.
        start: first position.
        end: behind the last position.
        floor: first position whose window entries exist behind the candidate source.
    """

    request: Request
    phase: Phase
    start: int
    end: int
    floor: int

    @property
    def kept(self) -> int:
        """First position that runs all layers; `end` if none does."""
        return min(max(self.start, self.floor), self.end)

    @property
    def wanted(self) -> range:
        """Positions whose logits are wanted."""
        if self.request.logits != "last":
            return range(self.kept, self.end)
        return range(self.end - 1 if self.end == len(self.request.token_ids) else self.end, self.end)


def make_parts(scheduled: Sequence[ScheduledRequest], config: TextConfig, replay: str) -> list[Part]:
    """Give every scheduled request its phase and its floor; decode requests first, otherwise in the order given."""
    tail, parts = tail_rows(config, replay), []
    for item in scheduled:
        request, start = item.request, item.request.num_computed_tokens
        narrow = 0 if tail is None or request.logits == "all" else max(0, request.num_prompt_tokens - tail)
        floor = max(narrow, request.first_computed_token)
        phase = item.phase(1 + config.dspark_block_size)
        parts.append(Part(request, phase, start, start + item.num_new_tokens, floor))
    return sorted(parts, key=lambda part: part.phase != Phase.DECODE)


def build_step(
    parts: Sequence[Part], config: TextConfig, engram_hash: EngramHash, page_tokens: int, device: torch.device
) -> Step:
    """Pack the parts of a step.

    Args:
        parts: of `make_parts`.
        config: the model's facts.
        engram_hash: finds the tokens' table rows.
        page_tokens: tokens per page.
        device: where tensors go.
    """
    rings = upload(torch.tensor([part.request.ring for part in parts], dtype=torch.int64), device)
    block_table = upload(_block_table(parts), device)

    shared = [part.request.num_shared_tokens for part in parts]

    def pack(begins: Sequence[int], ends: Sequence[int], floors: Sequence[int]) -> Rows:
        lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return Rows.pack(lens, begins, [p.phase for p in parts], floors, rings, block_table, page_tokens, shared)

    starts, kept, ends = [p.start for p in parts], [p.kept for p in parts], [p.end for p in parts]
    origins = [part.request.first_computed_token for part in parts]
    encoder = source = decoder = pack(starts, ends, origins)
    narrowing = None
    if any(part.floor > origin for part, origin in zip(parts, origins, strict=True)):
        source, decoder = pack(kept, ends, origins), pack(kept, ends, [p.floor for p in parts])
        stays = torch.cat([torch.arange(p.start, p.end) >= p.kept for p in parts])
        narrowing = Narrowing(
            kept=upload(torch.nonzero(stays).flatten(), device),
            dropped=upload(torch.nonzero(~stays).flatten(), device),
            dropped_rows=pack(starts, kept, origins),
        )
    depth = config.engram_max_ngram_size
    histories = [np.empty((0, depth), np.int64), *(_history(part, depth) for part in parts)]
    history = upload(torch.from_numpy(np.concatenate(histories)), device)
    return Step(history[:, 0], engram_hash.rows(history), encoder, source, decoder, narrowing)


def wanted_rows(parts: Sequence[Part]) -> Tensor:
    """Rows of `step.decoder` whose logits are wanted, request after request, int64 on the CPU."""
    rows, begin = [torch.empty(0, dtype=torch.int64)], 0
    for part in parts:
        offset = begin - part.kept
        rows.append(torch.arange(part.wanted.start + offset, part.wanted.stop + offset))
        begin += part.end - part.kept
    return torch.cat(rows)


def _block_table(parts: Sequence[Part]) -> Tensor:
    width = max((len(part.request.pages) for part in parts), default=0)
    table = torch.full((len(parts), width), -1, dtype=torch.int32)
    for row, part in zip(table, parts, strict=True):
        row[: len(part.request.pages)] = torch.tensor(part.request.pages, dtype=torch.int32)
    return table


def _history(part: Part, depth: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Token ids at p, p - 1, ... of each row, -1 before the start: int64 `[end - start, depth]`."""
    first = part.start - depth + 1
    known = part.request.token_ids[max(0, first) : part.end]
    ids = np.array([-1] * max(0, -first) + list(known), dtype=np.int64)
    return np.lib.stride_tricks.sliding_window_view(ids, depth)[:, ::-1].copy()
