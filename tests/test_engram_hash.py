"""Engram rows are exact: against the golden sets, the trained checkpoint and the released constants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError
from minideepinfer.model.engram_hash import EngramHash, hash_constants, token_map
from safetensors import safe_open
from tokenizers import Tokenizer

DATA = Path(__file__).parent / "data"
TINY = Path(__file__).parents[1] / "engine" / "minideepinfer" / "data" / "tiny"
SETS = ("tiny-a", "tiny-b")


def load(directory: Path) -> EngramHash:
    return EngramHash(ModelConfig.from_file(directory), Tokenizer.from_file(str(directory / "tokenizer.json")))


def recorded(name: str) -> dict[str, Any]:
    if name == "trained":
        return json.loads((DATA / "trained" / "golden.json").read_text())["engram"]
    return json.loads((DATA / "golden" / name / "engram_hash.json").read_text())


def directory_of(name: str) -> Path:
    return TINY if name == "trained" else DATA / "golden" / name


def history_of(ids: list[int], ngram: int) -> torch.Tensor:
    padded = torch.tensor([-1] * (ngram - 1) + ids)
    return padded.unfold(0, ngram, 1).flip(1)


@pytest.mark.parametrize("name", [*SETS, "trained"])
def test_map_and_constants_equal_the_recorded_ones(name: str) -> None:
    want, engram = recorded(name), load(directory_of(name))
    assert token_map(Tokenizer.from_file(str(directory_of(name) / "tokenizer.json"))) == want["token_map"]
    assert engram.pad == want["pad_id"]
    for key in ("primes", "offsets", "multipliers"):
        assert [list(getattr(layer, key)) for layer in engram.constants] == want[key]


@pytest.mark.parametrize("name", SETS)
def test_rows_equal_the_golden_hash_ids(name: str) -> None:
    directory = directory_of(name)
    manifest = json.loads((directory / "manifest.json").read_text())
    token_ids = {sequence["name"]: sequence["token_ids"] for sequence in manifest["sequences"]}
    engram, config = load(directory), ModelConfig.from_file(directory).text_config
    compared = 0
    for file in sorted(directory.glob("golden.*.safetensors")):
        ids = token_ids[file.name.split(".")[1]]
        rows = engram.rows(history_of(ids, config.engram_max_ngram_size))
        with safe_open(file, "pt") as golden:
            for index, layer_id in enumerate(config.engram_layer_ids):
                key = f"layers.{layer_id}.engram.hash_ids"
                if key in golden.keys():  # noqa: SIM118
                    assert torch.equal(rows[index], golden.get_tensor(key).long()), file.name
                    compared += 1
    assert compared >= 3


def test_constants_of_the_released_model() -> None:
    want = json.loads((DATA / "golden" / "engram-released-constants.json").read_text())
    text = ModelConfig.from_file(TINY).text_config.model_copy(
        update={
            "engram_layer_ids": tuple(int(i) for i in want["layers"]),
            "engram_num_embeddings": tuple(layer["rows"] for layer in want["layers"].values()),
            "engram_max_ngram_size": want["max_ngram"],
            "engram_vocab_size": 16_000_000,
            "engram_n_heads": want["heads"],
            "engram_compressed_vocab_size": want["compressed_vocab"],
        }
    )
    for got, layer in zip(hash_constants(text), want["layers"].values(), strict=True):
        assert list(got.multipliers) == layer["multipliers"]
        assert list(got.primes) == layer["primes"]
        assert list(got.offsets) == layer["offsets"]


def by_definition(engram: EngramHash, ids: list[int], position: int, image: int, numbers: list[int]) -> list[list[int]]:
    """Spec 3.9 in Python integers, one position."""
    result = []
    for layer in engram.constants:
        blocked, hashed, row = False, 0, []
        for s, multiplier in enumerate(layer.multipliers):
            blocked = blocked or position - s < 0 or ids[position - s] == image
            hashed ^= (engram.pad if blocked else numbers[ids[position - s]]) * multiplier
            assert hashed < 2**63
            for c in range((s - 1) * 2, s * 2) if s else ():
                row.append(layer.offsets[c] + hashed % layer.primes[c])
        result.append(row)
    return result


@given(st.lists(st.integers(0, 511) | st.just(500), min_size=1, max_size=12))
def test_padding_is_sticky_at_the_start_and_behind_images(ids: list[int]) -> None:
    engram, numbers = load_tiny_a()
    rows = engram.rows(history_of(ids, 4))
    for position in range(len(ids)):
        assert [layer[position].tolist() for layer in rows] == by_definition(engram, ids, position, 500, numbers)


_tiny_a: list[Any] = []


def load_tiny_a() -> tuple[EngramHash, list[int]]:
    if not _tiny_a:
        _tiny_a.extend([load(directory_of("tiny-a")), recorded("tiny-a")["token_map"]])
    return _tiny_a[0], _tiny_a[1]


def test_no_rows_for_no_tokens() -> None:
    engram, _ = load_tiny_a()
    assert [r.shape for r in engram.rows(torch.zeros(0, 4, dtype=torch.int64))] == [(0, 6), (0, 6)]


def test_without_a_tokenizer_ids_are_folded() -> None:
    config = ModelConfig.from_file(directory_of("tiny-a"))
    engram = EngramHash(config, None)
    low, high = engram.rows(torch.tensor([[70, 8, 9, 10], [70 + 420, 8, 9, 10]]))[0]
    assert torch.equal(low, high)


def test_a_foreign_tokenizer_is_refused_with_the_counts() -> None:
    tokenizer = Tokenizer.from_file(str(directory_of("tiny-b") / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"356 compressed ids over 448 tokens.*420"):
        EngramHash(ModelConfig.from_file(directory_of("tiny-a")), tokenizer)


def test_a_table_of_another_size_is_refused_with_the_sums() -> None:
    text = ModelConfig.from_file(directory_of("tiny-a")).text_config
    with pytest.raises(CheckpointError, match=r"layer 4: .* 834 .* 840"):
        hash_constants(text.model_copy(update={"engram_num_embeddings": (630, 840)}))


def test_ids_behind_the_tokenizer_hash_as_padding_without_blocking_what_is_older() -> None:
    directory = directory_of("tiny-a")
    config = ModelConfig.from_file(directory)
    larger = config.model_copy(update={"text_config": config.text_config.model_copy(update={"vocab_size": 520})})
    engram = EngramHash(larger, Tokenizer.from_file(str(directory / "tokenizer.json")))
    beyond, pad, image = (engram.rows(torch.tensor([[9, token, 10, 11]]))[0] for token in (515, 2, 500))
    assert torch.equal(beyond, pad)
    assert not torch.equal(beyond, image)
