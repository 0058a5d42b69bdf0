"""One thing at a time is corrupted in a valid checkpoint: it is refused by name, or it changes nothing.

Left out on purpose: values that stay legal (a flipped mantissa bit, two tensors' data exchanged, another `rope_theta`).
A format without checksums cannot tell them from other weights; they are no fault of structure.
"""

from __future__ import annotations

import random
import shutil
import struct
from collections import defaultdict
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import pytest
import torch
from checkpoint_corruptions import EITHER, REFUSED, edit_section, set_byte
from checkpoint_files import INDEX, edit_shard, make_small, read_raw, shard_of
from engine_fixtures import Arrival, play, poison
from minideepinfer.checkpoint import Checkpoint, expected_tensors
from minideepinfer.checkpoint.layout import SKIPPED_KINDS
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import MiniDeepInferError
from minideepinfer.runtime.runner import Runner

CASES_PER_KIND = 8
CPU = torch.device("cpu")


def load_and_run(directory: Path) -> dict[str, torch.Tensor]:
    """Everything the text model reads, as it is used, and the logits of a prompt in two chunks."""
    with Checkpoint.open(directory) as checkpoint:
        text = checkpoint.config.text_config
        found = {}
        for spec in expected_tensors(checkpoint.config).values():
            if spec.kind in SKIPPED_KINDS:
                continue
            found[spec.name] = checkpoint.tensor(spec.name)
            if spec.dtype == "F8_E4M3" and spec.kind != "engram tables":
                name = spec.name.removesuffix(".weight")
                found[f"{name} decoded"] = checkpoint.dense(name, torch.bfloat16, CPU)
            if spec.kind == "engram tables":
                found[f"{spec.name} mapped"] = checkpoint.row_table(spec.name, "mmap", CPU).clone()
        for layer in range(text.num_hidden_layers):
            experts = checkpoint.experts(f"layers.{layer}.ffn.experts", range(text.n_routed_experts), CPU)
            found[f"experts {layer}"] = torch.cat([experts.w13.flatten(), experts.w2.flatten()])
            found[f"expert scales {layer}"] = torch.cat([experts.w13_scale.flatten(), experts.w2_scale.flatten()])
    return found | {"logits": logits(directory)}


def logits(directory: Path) -> torch.Tensor:
    """Of 20 tokens, float32 `[20, vocab]`, in memory that holds NaN."""
    runner = Runner(directory, EngineConfig(dtype="float32", device="cpu", cache={"num_pages": 1, "max_requests": 1}))
    poison(runner)
    rows = play(runner, [Arrival(tuple(range(3, 23)), 20)], repeat(13)).rows(0)[1]
    assert torch.isfinite(rows).all()
    return rows


@dataclass(frozen=True)
class Outcome:
    """What became of one corruption."""

    kind: str
    seed: int
    verdict: str  # refused | harmless | nameless | silent | crash
    message: str


def names_in(directory: Path) -> set[str]:
    """Every file and tensor that a message could name, as far as the files can be read."""
    names = {INDEX, "config.json"} | {file.name for file in directory.iterdir()}
    for file in directory.glob("*.safetensors"):
        with suppress(ValueError, struct.error):
            names |= set(read_raw(file)[0])
    return names - {"", "__metadata__"}


def outcome(
    kind: str, seed: int, directory: Path, clean: dict[str, torch.Tensor], names: Set[str] = frozenset()
) -> Outcome:
    """Load a corrupted checkpoint and judge what happens; `names` are those of the valid checkpoint."""
    names = names | names_in(directory)
    try:
        found = load_and_run(directory)
    except MiniDeepInferError as error:
        named = any(name in str(error) for name in names)
        return Outcome(kind, seed, "refused" if named else "nameless", str(error))
    except Exception as error:
        return Outcome(kind, seed, "crash", repr(error))
    same = found.keys() == clean.keys() and all(
        found[name].dtype == tensor.dtype and found[name].view(torch.uint8).equal(tensor.view(torch.uint8))
        for name, tensor in clean.items()
    )
    return Outcome(kind, seed, "harmless" if same else "silent", "")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    base = tmp_path_factory.mktemp("fuzz")
    clean_directory = make_small(base)
    clean, names = load_and_run(clean_directory), names_in(clean_directory)
    results = []
    for name, corrupt in (REFUSED | EITHER).items():
        for seed in range(CASES_PER_KIND):
            directory = base / "corrupted"
            shutil.copytree(clean_directory, directory)
            corrupt(directory, random.Random(f"{name} {seed}"))
            results.append(outcome(name, seed, directory, clean, names))
            shutil.rmtree(directory)
    return results


def with_verdict(outcomes: list[Outcome], verdict: str) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.verdict == verdict]


def test_there_are_enough_of_them(outcomes: list[Outcome]) -> None:
    assert len(outcomes) >= 200
    assert len({outcome.kind for outcome in outcomes}) >= 12


@pytest.mark.parametrize("verdict", ["crash", "silent", "nameless"])
def test_never(outcomes: list[Outcome], verdict: str) -> None:
    """No error of another kind, no wrong load, no refusal that names neither tensor nor file."""
    assert with_verdict(outcomes, verdict) == []


def test_kinds_that_are_always_refused(outcomes: list[Outcome]) -> None:
    assert [outcome for outcome in with_verdict(outcomes, "harmless") if outcome.kind in REFUSED] == []


def test_most_kinds_are_refused(outcomes: list[Outcome]) -> None:
    verdicts: dict[str, set[str]] = defaultdict(set)
    for result in outcomes:
        verdicts[result.kind].add(result.verdict)
    refused = [name for name, found in verdicts.items() if found == {"refused"}]
    print(f"{len(outcomes)} corruptions; {len(refused)} of {len(verdicts)} kinds refused every time; the others:")
    print({name: sorted(found) for name, found in verdicts.items() if name not in refused})
    assert len(refused) >= 0.8 * len(verdicts)


def test_the_judge_notices_a_silent_change(tmp_path: Path) -> None:
    """The test of the test: a flipped mantissa bit, which nothing can refuse, is judged `silent`."""
    directory = make_small(tmp_path)
    clean = load_and_run(directory)
    file = shard_of(directory, "norm.weight")
    edit_shard(file, lambda e: set_byte(e, "norm.weight", 0, bytes([e["norm.weight"].data[0] ^ 1])))
    assert outcome("mantissa", 0, directory, clean).verdict == "silent"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """After a refusal the same process opens the valid checkpoint as if nothing had happened."""
    directory = make_small(tmp_path)
    clean = load_and_run(directory)
    config = (directory / "config.json").read_bytes()
    edit_section(directory, "text_config", lambda keys: keys.update(hidden_size=192))
    assert outcome("size", 0, directory, clean).verdict == "refused"
    (directory / "config.json").write_bytes(config)
    assert outcome("none", 0, directory, clean).verdict == "harmless"
    assert ModelConfig.from_file(directory).text_config.hidden_size == 96
