"""Broken attention, from `naive`; and from acme's tiled operator, for faults that need tiles."""

from __future__ import annotations

from mutants import mutant

NAIVE = (
    mutant("window-one-short", "matches-reference", "torch.arange(1 - window, 1", "torch.arange(2 - window, 1"),
    mutant("window-one-long", "matches-reference", "torch.arange(1 - window, 1", "torch.arange(-window, 1"),
    mutant(
        "causal-bound-inclusive",
        "matches-reference",
        "entries < metadata.visible[rows]",
        "entries <= metadata.visible[rows]",
    ),
    mutant(
        "group-visible-before-its-last-token",
        "matches-reference",
        "batch.visible_entries(self._problem.compress_ratio or 1)",
        "(batch.positions + 2) // (self._problem.compress_ratio or 1)",
    ),
    mutant(
        "window-and-selection-merged",
        "matches-reference",
        "keys = keys.followed_by(_selected_keys(global_kv, self._layout.main, selection, metadata, rows))",
        "oldest = metadata.batch.positions[rows, None] - keys.valid.shape[1]\n"
        "                    selected = _selected_keys(global_kv, self._layout.main, selection, metadata, rows)\n"
        "                    selected.valid.logical_and_(selection.indices[rows] <= oldest)\n"
        "                    keys = keys.followed_by(selected)",
    ),
    mutant(
        "sink-forgotten",
        "matches-reference",
        "denominator = denominator + (sink[:, None] - peak).exp()",
        "pass",
    ),
    mutant("sink-scaled", "matches-reference", "(sink[:, None] - peak).exp()", "(sink[:, None] * scale - peak).exp()"),
    mutant(
        "sink-counted-as-a-value",
        "matches-reference",
        "weights.to(q.dtype).float() @ values / denominator",
        "(weights.to(q.dtype).float() @ values + (0 if sink is None else (sink[:, None] - peak).exp())) / denominator",
    ),
    mutant(
        "no-sink-is-a-sink-of-zero",
        "no-sink",
        "    if sink is not None:\n        peak",
        "    sink = q.new_zeros(q.shape[1]).float() if sink is None else sink\n    if sink is not None:\n        peak",
    ),
    mutant(
        "invalid-slot-read-with-weight-0",
        "unread-memory",
        ".masked_fill(~valid.unsqueeze(-1), 0.0)",
        "",
    ),
    mutant(
        "zeroed-only-if-padding",
        "A2",
        "heads.masked_fill(~keys.valid.any(1)[",
        "heads.masked_fill((metadata.batch.positions[rows] < 0)[",
    ),
    mutant(
        "other-negative-index-read-as-entry-0",
        "matches-reference",
        "entries = selection.indices[rows].long()",
        "entries = selection.indices[rows].long()\n    entries = entries.where(entries != -7, 0)",
    ),
    mutant(
        "wrong-page-for-the-second-request",
        "permuted-units",
        "entries // per_page].long()",
        "entries // per_page].long()\n    pages = (pages + (batch.request_ids[rows, None] == 1)) % len(pool)",
    ),
    mutant(
        "block-table-of-another-request",
        "units-alone",
        "entries // per_page].long()",
        "entries // per_page].long()\n"
        "    other = batch.block_table[batch.request_ids[rows, None] - 1, entries // per_page]\n"
        "    pages = other.long().where(other < len(pool), pages)",
    ),
    mutant(
        "page-number-off-by-one",
        "other-pages",
        "pages * per_page + entries",
        "(pages + 1) % len(pool) * per_page + entries",
    ),
    mutant("lens-ignored", "A3", "    if selection.lens is not None:", "    if False:"),
    mutant("lens-inclusive", "A3", "< selection.lens[rows]", "<= selection.lens[rows]"),
    mutant("slot-by-window-size", "matches-reference", "positions % ring.shape[1]", "positions % window"),
    mutant(
        "ring-number-is-the-request",
        "other-rings",
        "batch.ring_table[request].unsqueeze(1)",
        "request.unsqueeze(1)",
    ),
    mutant(
        "window-start-ignored",
        "matches-reference",
        "batch.window_start[request].clamp(min=0).unsqueeze(1)",
        "0",
    ),
    mutant(
        "chunk-ends-the-window",
        "other-chunks",
        "is_old = valid & (positions < context)",
        "valid = valid & (positions >= context)\n        is_old = torch.zeros_like(valid)",
    ),
    mutant(
        "first-row-of-the-batch",
        "permuted-units",
        "first_row=batch.cu_seqlens[batch.request_ids].long()",
        "first_row=torch.zeros_like(batch.request_ids)",
    ),
    mutant("rotated-forward", "matches-reference", "cos[rows], sin[rows])", "cos[rows], -sin[rows])"),
    mutant(
        "row-without-keys-not-cleared",
        "rows-without-keys",
        "heads = heads.masked_fill(~keys.valid.any(1)[:, None, None], 0.0)",
        "pass",
    ),
    mutant(
        "last-partial-tile-dropped",
        "outputs-written",
        "range(0, num_rows, _ROWS)",
        "range(0, num_rows - num_rows % _ROWS, _ROWS)",
    ),
    mutant(
        "input-changed-in-place",
        "inputs-left-alone",
        "num_rows = q.shape[0]",
        "num_rows = q.shape[0]\n        window_new.nan_to_num_(0.0)",
    ),
    mutant("output-in-place-of-q", "inputs-left-alone", "output = torch.empty_like(q)", "output = q"),
    mutant(
        "logits-in-bfloat16",
        "matches-reference",
        ".float() @ values.mT) * scale",
        ".float() @ values.mT).mul(scale).bfloat16().float()",
    ),
    mutant(
        "order-of-sums-by-schedule",
        "repeatable",
        "            heads = undo_rope(",
        "            self.calls = getattr(self, 'calls', 0) + 1\n"
        "            if self.calls % 2:\n"
        "                keys = _Keys(keys.values.flip(1), keys.valid.flip(1))\n"
        "            heads = undo_rope(",
    ),
    mutant(
        "depends-on-the-number-of-rows",
        "units-alone",
        "scale), cos[rows]",
        "scale * (1 + 1e-6 * (num_rows > 1))), cos[rows]",
    ),
    mutant(
        "denominator-in-bfloat16",
        "article",
        "@ values / denominator)",
        "@ values / denominator.to(q.dtype))",
    ),
    mutant(
        "store-past-the-end",
        "outputs-written",
        "            output[start : start + _ROWS] = heads[: num_rows - start]",
        "            output[start : start + _ROWS] = heads[: num_rows - start]\n"
        "            end = output.storage_offset() + output.numel()\n"
        "            if output.untyped_storage().nbytes() > end * output.element_size():  # else it is the heap's\n"
        "                output.as_strided((1,), (1,), end).zero_()",
    ),
    mutant(
        "int32-offset",
        "64-bit-offsets",
        "entries = table[index.where(valid, 0)]",
        "offsets = (index.where(valid, 0) * table.shape[-1]).int().long().unsqueeze(-1)\n"
        "    entries = table.flatten()[offsets + torch.arange(table.shape[-1])]",
    ),
    mutant(
        "high-nibble-is-the-even-channel",
        "matches-reference",
        "return form.decode(entries, torch.float32)",
        "values = form.decode(entries, torch.float32)\n"
        "    if entries.dtype == torch.uint8 and form.packing.bits == 4:\n"
        "        values = values.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)\n"
        "    return values",
    ),
    mutant(
        "scale-of-the-neighbouring-group",
        "matches-reference",
        "return form.decode(entries, torch.float32)",
        "if entries.dtype == torch.uint8:\n"
        "        scales = entries.shape[-1] // (form.packing.bits * form.packing.group // 8 + 1)\n"
        "        entries = torch.cat([entries[..., :-scales], entries[..., -scales:].roll(1, -1)], -1)\n"
        "    return form.decode(entries, torch.float32)",
    ),
    mutant(
        "window-scale-read-as-main-scale",
        "matches-reference",
        "return form.decode(entries, torch.float32)",
        "values = form.decode(entries, torch.float32)\n"
        "    if entries.dtype == torch.uint8 and form.packing.bits == 8:\n"
        "        codes, scales = (part.view(torch.float8_e4m3fn).float() for part in entries.tensor_split(\n"
        "            (values.shape[-1],), -1))\n"
        "        values = codes * scales.repeat_interleave(32, -1)\n"
        "    return values",
    ),
    mutant(
        "one-key-is-enough",
        "other-slots",
        "entries = entries.where(valid, 0)",
        "valid = valid & (valid.cumsum(1) < valid.shape[1] // 2 + 2)\n    entries = entries.where(valid, 0)",
    ),
    mutant(
        "metadata-of-a-batch-with-as-many-rows",
        "end-to-end",
        "        return _Metadata(\n            batch,",
        "        self.kept = getattr(self, 'kept', {})\n"
        "        return self.kept.setdefault(batch.num_tokens, _Metadata(\n            batch,",
        "visible=visible.unsqueeze(1),\n        )",
        "visible=visible.unsqueeze(1),\n        ))",
    ),
    mutant(
        "metadata-changed-by-run",
        "end-to-end",
        "        return output\n\n    def _window_keys",
        "        metadata.visible.sub_(1)\n        return output\n\n    def _window_keys",
    ),
)

TILED = (
    mutant("maximum-starts-at-minus-infinity", "A1", "-1e30", "-torch.inf"),
    mutant(
        "sum-not-rescaled-between-tiles",
        "matches-reference",
        "self.sum * rescale + weights @ keys",
        "self.sum + weights @ keys",
    ),
    mutant(
        "total-not-rescaled-between-tiles",
        "matches-reference",
        "self.total * rescale + weights.sum",
        "self.total + weights.sum",
    ),
    mutant(
        "last-partial-tile-of-keys-dropped",
        "matches-reference",
        "range(0, source.rows.shape[1], self._tile_size)",
        "range(0, source.rows.shape[1] - source.rows.shape[1] % 4, 4)",
    ),
)
