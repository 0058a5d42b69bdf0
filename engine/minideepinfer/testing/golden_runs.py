"""Driving a runner over one known sequence: as requests, and as the steps that single modules are called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.config import TextConfig
from minideepinfer.model.rows import Rows
from minideepinfer.model.step import Step
from minideepinfer.operators import Phase, Selection
from minideepinfer.runtime.batching import build_step, make_parts
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.request import LogitsKind, Request
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import ScheduledRequest


def make_request(runner: Runner, token_ids: Sequence[int], prompt: int, logits: LogitsKind) -> Request:
    """A request that holds ring 0 and the pages it needs, the highest one first."""
    pages = range(-(-len(token_ids) // runner.page_tokens))
    return Request(0, list(token_ids), prompt, len(token_ids), logits, ring=0, pages=list(reversed(pages)))


def run_sequence(
    runner: Runner,
    token_ids: Sequence[int],
    chunks: Sequence[int],
    capture: Capture | None = None,
    *,
    prompt: int | None = None,
    logits: LogitsKind = "all",
) -> Tensor:
    """Logits of a known sequence on the CPU.

    Args:
        runner: the model.
        token_ids: the sequence.
        chunks: tokens of each step; they add up to the sequence.
        capture: collects intermediates, as request 0.
        prompt: tokens that are the prompt; None = all.
        logits: rows whose logits are wanted.
    """
    request = make_request(runner, token_ids, len(token_ids) if prompt is None else prompt, logits)
    results = [runner.execute([ScheduledRequest(request, count)], capture)[0] for count in chunks]
    return torch.cat([result.logits.cpu() for result in results])


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens of a sequence that run as one step.

    Attributes:
        tokens: their positions.
        step: of all of them, as they would run.
        probes: those of the sequence's probe positions that lie here, int64 `[p]`, and where they stand among all
            probe positions, `probe_rows`.
    """

    tokens: slice
    step: Step
    phase: Phase
    probes: Tensor
    probe_rows: slice


def make_spans(runner: Runner, token_ids: Sequence[int], probes: Tensor) -> list[Span]:
    """Cut a sequence into a prefill and a decode step, so that the operators of both phases are called.

    The decode step has as many rows as a verified draft block; a sequence too short for one is all prefill.
    """
    config = runner.config.text_config
    most = 1 + config.dspark_block_size
    last = min(most, len(token_ids) // 2)
    request = make_request(runner, token_ids, len(token_ids), "all")
    spans, begin = [], 0
    for count in (len(token_ids) - last, last):
        if not count:
            continue
        request.num_computed_tokens = begin
        parts = make_parts([ScheduledRequest(request, count)], config, "full")
        step = build_step(parts, config, runner.engram_hash, runner.page_tokens, runner.device)
        inside = torch.nonzero((probes >= begin) & (probes < begin + count)).flatten()
        rows = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
        spans.append(Span(slice(begin, begin + count), step, parts[0].phase, probes[inside], rows))
        begin += count
    return spans


def probe_step(runner: Runner, span: Span) -> Step:
    """A step of a span's probe rows alone, for modules that treat each row by itself; its positions mean nothing."""
    step = span.step
    here = (span.probes - span.tokens.start).to(runner.device)
    rings = torch.zeros(1, dtype=torch.int64, device=runner.device)
    rows = Rows.pack([len(here)], [0], [span.phase], [0], rings, step.encoder.block_table, runner.page_tokens)
    return Step(step.token_ids[here], [ids[here] for ids in step.engram_rows], rows, rows, rows)


def padded_selection(indices: Tensor, config: TextConfig, device: torch.device) -> Selection:
    """A golden selection `[T, K]`, as wide as operators expect."""
    width = config.index_topk
    padded = F.pad(indices[:, :width], (0, max(0, width - indices.shape[1])), value=-1)
    return Selection(padded.to(device, torch.int32).contiguous())


def candidate_blocks(mask: Tensor | None, num_tokens: int, config: TextConfig, device: torch.device) -> Tensor:
    """Golden candidates as block numbers.

    Args:
        mask: `[T, entries]`, nonzero where an entry is a candidate; None = none is.
        num_tokens: T.
        config: for sizes.
        device: of the result.

    Returns:
        int32 `[T, candidate_topk_blocks]`, -1 behind the last.
    """
    count, size = config.candidate_topk_blocks, config.candidate_block_size
    if mask is None:
        return torch.full((num_tokens, count), -1, dtype=torch.int32, device=device)
    named = F.pad(mask.bool(), (0, -mask.shape[1] % size)).unflatten(1, (-1, size)).any(-1)
    numbers = torch.arange(named.shape[1]).where(named, -1).sort(1, descending=True).values
    padded = F.pad(numbers[:, :count], (0, max(0, count - numbers.shape[1])), value=-1)
    return padded.to(device, torch.int32).contiguous()
