"""Text to ids and back; pieces of a stream add up to the whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError, RequestError
from minideepinfer.runtime.tokenizer import Tokenizer, load_tokenizer

TINY = Path(__file__).parents[1] / "engine" / "minideepinfer" / "data" / "tiny"
GOLDEN = Path(__file__).parent / "data" / "golden" / "tiny-a"
CONFIG = ModelConfig.from_file(TINY)
TOKENIZER = load_tokenizer(TINY, CONFIG)

SNIPPETS = json.loads((Path(__file__).parent / "data" / "trained" / "golden.json").read_text())["snippets"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", sorted(SNIPPETS))
def test_recorded_snippets_have_the_recorded_ids(name: str) -> None:
    snippet = SNIPPETS[name]
    assert TOKENIZER.encode(snippet["text"]) == snippet["ids"]
    assert TOKENIZER.decode(snippet["ids"]) == snippet["text"]


def test_the_begin_token_is_added_where_the_checkpoint_says_so(checkpoint: Path) -> None:
    assert TOKENIZER.encode("a")[0] == CONFIG.bos_token_id
    settings = checkpoint / "tokenizer_config.json"
    settings.write_text('{"add_bos_token": false}')
    assert load_tokenizer(checkpoint, CONFIG).encode("a") == TOKENIZER.encode("a")[1:]
    settings.unlink()
    assert load_tokenizer(checkpoint, CONFIG).encode("a") == TOKENIZER.encode("a")[1:]


@given(st.lists(st.integers(0, 2047), max_size=30))
@example(TOKENIZER.encode("naïve 中文 🎉🎉")[:-1])
def test_pieces_add_up_to_the_whole_for_any_ids(ids: list[int]) -> None:
    stream = TOKENIZER.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == TOKENIZER.decode(ids)
    assert stream.finish() == ""


@given(st.text(max_size=20))
def test_no_piece_of_a_text_shows_half_a_character(text: str) -> None:
    stream = TOKENIZER.stream()
    pieces = [stream.push(token_id) for token_id in TOKENIZER.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + stream.finish() == TOKENIZER.decode(TOKENIZER.encode(text))


def test_a_character_of_several_tokens_comes_whole() -> None:
    stream, ids = TOKENIZER.stream(), TOKENIZER.encode("🎉")[1:]
    assert len(ids) > 1
    assert [stream.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["🎉"]


def test_without_a_tokenizer_text_is_refused_and_ids_have_no_text(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    tokenizer = load_tokenizer(checkpoint, CONFIG)
    with pytest.raises(RequestError, match=r"no tokenizer\.json; give token ids instead"):
        tokenizer.encode("a")
    assert tokenizer.decode([5, 6]) == ""
    assert tokenizer.stream().push(5) == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: is not a tokenizer"),
        ("tokenizer.json", "{}", r"tokenizer\.json: is not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: is not JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: holds a list"),
    ],
)
def test_damaged_files_are_refused_by_name(checkpoint: Path, name: str, content: str, message: str) -> None:
    (checkpoint / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(checkpoint, CONFIG)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"has 2048 tokens, but vocab_size is 512"):
        load_tokenizer(TINY, ModelConfig.from_file(GOLDEN))


def test_the_empty_tokenizer_is_quiet() -> None:
    assert Tokenizer(None).stream().finish() == ""
