"""Margins of choices against the golden sets, and how far a changed choice reaches."""

from __future__ import annotations

from itertools import repeat

import pytest
import torch
from engine_fixtures import LONGEST, Arrival, golden_tokens, play, poison, runner_of
from golden_sets import GOLDEN
from minideepinfer.testing.margins import CHOICES, SCORED, choice_margins, trace_choices
from safetensors.torch import load_file
from torch import Tensor


@pytest.mark.parametrize("name", ["tiny-a", "tiny-b"])
@pytest.mark.parametrize("budget", [1000, 40])
def test_margins_are_those_of_the_golden_sets(name: str, budget: int) -> None:
    """Golden margins come from another implementation; both are float32 scores of a size of about 1."""
    runner = runner_of(name)
    ids = tuple(golden_tokens(name, LONGEST[name]))
    poison(runner)
    captured = play(runner, [Arrival(ids, len(ids))], repeat(budget), capture=SCORED).capture.of(0)
    margins = choice_margins(captured, runner.config.text_config, runner.model.weights.layers)
    golden = load_file(GOLDEN / name / f"golden.{LONGEST[name]}.fp32-noq.safetensors")
    assert set(margins) == {key for key in golden if key.endswith("_margin")}
    for key, margin in margins.items():
        cut = torch.isfinite(margin)
        assert torch.equal(cut, torch.isfinite(golden[key])), key
        assert torch.allclose(margin[cut], golden[key][cut].double(), rtol=0, atol=2e-5), key


def choices(num_tokens: int) -> dict[str, Tensor]:
    """Choices of tiny-a's layers, all the same."""
    config = runner_of("tiny-a").config.text_config
    found = {}
    for layer in config.layers:
        found[f"layers.{layer.layer_id}.ffn.expert_ids"] = torch.arange(3).repeat(num_tokens, 1)
        if layer.is_index_source:
            found[f"layers.{layer.layer_id}.index.topk"] = torch.arange(8).repeat(num_tokens, 1)
    found["layers.5.index.candidates"] = torch.arange(5).repeat(num_tokens, 1)
    return found


def changed(name: str, row: int) -> dict[str, Tensor]:
    other = choices(100)
    other[name] = other[name].clone()
    other[name][row, 0] = 77
    return other


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("layers.8.ffn.expert_ids", 40),  # nothing behind it
        ("layers.7.ffn.expert_ids", 40 + 15),  # one more window of 16
        ("layers.7.index.topk", 40 + 15),
        ("layers.5.index.candidates", 40 + 3 * 15),  # layers 6 to 8; the entries of layer 5 are published before
        ("layers.5.ffn.expert_ids", 40 + 3 * 15),
        ("layers.4.ffn.expert_ids", 99),  # through the entries of layer 5
        ("layers.0.ffn.expert_ids", 99),
    ],
)
def test_a_changed_choice_reaches_windows_and_later_entries(name: str, last: int) -> None:
    trace = trace_choices(choices(100), changed(name, 40), runner_of("tiny-a").config.text_config)
    assert torch.nonzero(trace.affected).flatten().tolist() == list(range(40, last + 1))
    assert sum(int(roots.sum()) for roots in trace.roots.values()) == 1


def test_the_order_of_a_set_is_no_choice_and_what_follows_is_no_root() -> None:
    config = runner_of("tiny-a").config.text_config
    other = {name: ids.flip(1) for name, ids in choices(100).items()}
    assert not trace_choices(choices(100), other, config).affected.any()
    other = changed("layers.2.ffn.expert_ids", 10)
    for name, row in (("layers.3.ffn.expert_ids", 20), ("layers.4.index.topk", 25), ("layers.5.index.topk", 90)):
        other[name] = changed(name, row)[name]
    roots = trace_choices(choices(100), other, config).roots
    assert {name: torch.nonzero(rows).flatten().tolist() for name, rows in roots.items() if rows.any()} == {
        "layers.2.ffn.route_margin": [10]
    }
