"""Comparing what the engine computed with the tensors of one golden file, whatever rows it holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minideepinfer.config import LayerSchedule, TextConfig
from minideepinfer.errors import VerificationError
from minideepinfer.testing.golden_bounds import CLEAR_MARGIN, Variant
from minideepinfer.testing.golden_measures import (
    Cell,
    as_mask,
    differing_rows,
    jaccard_distance,
    relative_l2,
    relative_l2_rows,
)
from minideepinfer.testing.golden_set import GoldenRun

Bound = Callable[[str, str, int | None], float | None]
"""From module, measure and layer to the largest error that passes; None = reported only."""


class Comparison:
    """Makes cells of one part of one sequence and variant. What the file lacks makes none.

    Attributes:
        cells: what was compared.
    """

    def __init__(self, golden: GoldenRun, variant: Variant, part: str, config: TextConfig, bound: Bound) -> None:
        self.golden = golden
        self.variant = variant
        self.part = part
        self.config = config
        self.bound = bound
        self.cells: list[Cell] = []

    def values(self, module: str, name: str, own: Tensor, positions: Tensor | None = None) -> None:
        """Compare by relative L2 of the whole tensor.

        Args:
            module: column of the report.
            name: of the golden tensor.
            own: its counterpart on the CPU, `[N, ...]`: a row for every token or entry, or for every probe position.
            positions: of own's rows, where they are others.
        """
        if (pair := self._pair(name, own, positions)) is not None:
            self._add(module, name, "rel L2", relative_l2(*pair), len(pair[0]))

    def logits(self, own: Tensor) -> None:
        """Compare logits `[N, vocab]`: whole, and the median and worst token."""
        if (pair := self._pair("logits", own)) is not None:
            tokens = relative_l2_rows(*pair)
            self._add("logits", "logits", "whole", relative_l2(*pair), len(tokens))
            self._add("logits", "logits", "median token", float(tokens.median()), len(tokens))
            self._add("logits", "logits", "worst token", float(tokens.max()), len(tokens))

    def codes(self, module: str, name: str, own: Tensor) -> None:
        """`values` of quantised entries; in float32 also lists the rows in which a code flipped."""
        if (pair := self._pair(name, own)) is None:
            return
        flipped: tuple[int, ...] = ()
        if self.variant.quantizes_kv and self.variant.dtype == "float32":
            limit = self.bound(module, "rel L2", None) or 0.0
            flipped = tuple(torch.nonzero(relative_l2_rows(*pair) > limit).flatten().tolist())
        self._add(module, name, "rel L2", relative_l2(*pair), len(pair[0]), flipped)

    def increment(self, name: str, own: Tensor, own_before: Tensor, before: Tensor) -> None:
        """Compare what was added to the streams `[P, S, H]`, own and golden, by relative L2."""
        after = self.golden.probed(name)
        if after is not None and after.numel():
            error = relative_l2(own.double() - own_before.double(), after.double() - before.double())
            self._add("engram", name, "rel L2", error, len(after))

    def hash_rows(self, name: str, own: Tensor) -> None:
        """Compare table rows, which are exact."""
        if (pair := self._pair(name, own)) is not None:
            self._rows("hash", name, differing_rows(*pair))

    def selection(self, name: str, own: Tensor, layer: LayerSchedule) -> None:
        """Compare a selection `[T, K]` as sets, where the golden cut is clear.

        In bfloat16 on golden inputs: the mean Jaccard distance over the rows where something is left out.
        """
        golden, clear = self.golden.get(name), self._clear(f"{name}_margin")
        if golden is None or clear is None:
            return
        if layer.uses_candidates:
            source = self._clear(f"layers.{self.config.candidate_source_layer_id}.index.candidate_margin")
            clear = clear if source is None else clear & source
        width = len(self.golden.sequence.token_ids) // layer.compress_ratio
        masks = as_mask(own, width), as_mask(golden, width)
        if self.part == "modules" and self.variant.dtype == "bfloat16":
            cut = self.golden.tensors[f"{name}_margin"].isfinite()
            if cut.any():
                distance = jaccard_distance(masks[0][cut], masks[1][cut])
                self._add("selection", name, "1 - Jaccard", distance, int(cut.sum()))
        else:
            self._rows("selection", name, differing_rows(*masks), clear)

    def candidates(self, name: str, own: Tensor, layer: LayerSchedule) -> None:
        """Compare candidate blocks `[T, B]` with a golden mask of visible entries, where the golden cut is clear."""
        golden, clear = self.golden.get(name), self._clear(name.removesuffix("s") + "_margin")
        if golden is None or clear is None:
            return
        size, width = self.config.candidate_block_size, golden.shape[1]
        mask = as_mask(own, -(-width // size)).repeat_interleave(size, dim=1)[:, :width]
        visible = (torch.arange(len(golden)) + 1) // layer.compress_ratio
        mask &= torch.arange(width) < visible.unsqueeze(1)
        self._rows("candidates", name, differing_rows(mask, golden.bool()), clear)

    def routing(self, name: str, ids: Tensor, weights: Tensor) -> None:
        """Compare free routing as sets where the golden cut is clear, and its weights where the experts are equal.

        Args:
            name: prefix, e.g. `layers.3.ffn`.
            ids: `[N, k]`, ascending in a row.
            weights: `[N, k]`.
        """
        whole = len(ids) == len(self.golden.sequence.token_ids)
        read = self.golden.get if whole else self.golden.probed
        golden_ids, golden_weights = read(f"{name}.expert_ids"), read(f"{name}.expert_weights")
        margin = read(f"{name}.route_margin")
        if golden_ids is None:
            return
        differs = differing_rows(*(as_mask(i, self.config.n_routed_experts) for i in (ids, golden_ids)))
        if margin is not None:
            self._rows("routing", f"{name}.expert_ids", differs, margin > CLEAR_MARGIN)
        if golden_weights is not None and not differs.all():
            error = relative_l2(weights[~differs], golden_weights[~differs])
            self._add("routing", f"{name}.expert_weights", "rel L2", error, int((~differs).sum()))

    def _clear(self, name: str) -> Tensor | None:
        margin = self.golden.get(name)
        return None if margin is None else margin > CLEAR_MARGIN

    def _rows(self, module: str, name: str, differs: Tensor, clear: Tensor | None = None) -> None:
        """A cell of the share of rows that differ, among those whose choice is clear."""
        clear = torch.ones_like(differs) if clear is None else clear
        if clear.any():
            wrong = torch.nonzero(differs & clear).flatten().tolist()
            self._add(module, name, "rows", len(wrong) / int(clear.sum()), int(clear.sum()), tuple(wrong))

    def _pair(self, name: str, own: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Own and golden rows side by side; None if the file lacks the tensor or it is empty."""
        golden = self.golden.get(name)
        if golden is None or not golden.numel():
            return None
        if len(own) != len(golden) or positions is not None:
            here = self.golden.positions(name)
            there = self._positions(own) if positions is None else positions
            if here is not None and there is not None:
                own, golden = own[torch.isin(there, here)], golden[torch.isin(here, there)]
        if own.shape != golden.shape:
            raise VerificationError(
                f"{self.golden.file}: {name} has shape {list(golden.shape)}, the engine computes {list(own.shape)}"
            )
        return own, golden

    def _positions(self, own: Tensor) -> Tensor:
        length = len(self.golden.sequence.token_ids)
        return torch.arange(length) if len(own) == length else self.golden.probes

    def _add(
        self, module: str, name: str, measure: str, value: float, num_rows: int, rows: tuple[int, ...] = ()
    ) -> None:
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        self.cells.append(
            Cell(
                sequence=self.golden.sequence.name,
                variant=self.variant.name,
                part=self.part,
                layer=layer,
                module=module,
                tensor=name,
                measure=measure,
                value=value,
                bound=self.bound(module, measure, layer),
                num_rows=num_rows,
                rows=rows,
            )
        )
