"""Text to ids and back, through the checkpoint's own `tokenizer.json`."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend

from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError, RequestError

_INCOMPLETE = "\ufffd"


class Tokenizer:
    """A checkpoint's tokenizer, or the lack of one.

    Attributes:
        backend: the Hugging Face tokenizer; None if the checkpoint has none. Ids then still work, and all text is "".
        bos_token_id: put in front of a text prompt; None if the checkpoint does not ask for it.
    """

    def __init__(self, backend: Backend | None, bos_token_id: int | None = None) -> None:
        self.backend = backend
        self.bos_token_id = bos_token_id

    def encode(self, text: str) -> list[int]:
        """Ids of a text prompt, the begin token in front where the checkpoint wants one.

        Raises:
            RequestError: the checkpoint has no tokenizer, or the text is not Unicode.
        """
        if self.backend is None:
            raise RequestError(
                "a text prompt needs a tokenizer, but the checkpoint has no tokenizer.json; give token ids instead"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text prompt is not Unicode ({error.reason} at character {error.start})") from None
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids if self.bos_token_id is None else [self.bos_token_id, *ids]

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids, special tokens left out; "" without a tokenizer."""
        if self.backend is None:
            return ""
        text: str = self.backend.decode(token_ids, skip_special_tokens=True)
        return text

    def stream(self) -> Detokenizer:
        """A decoder that is fed one token at a time."""
        return Detokenizer(self)


class Detokenizer:
    """Incremental decoding: the pieces joined equal `decode` of all tokens.

    Characters that need further tokens are held back. Only the tokens since the last complete piece are decoded again,
    behind the piece before it, so that the cost of a token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def copy(self) -> Detokenizer:
        """A decoder that was fed the same tokens."""
        other = Detokenizer(self._tokenizer)
        other._ids, other._prefix, other._read = list(self._ids), self._prefix, self._read
        return other

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is complete now."""
        self._ids.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        """What is still held back, replacement characters included."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        text = self._tokenizer.decode(self._ids[self._prefix :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]


def load_tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    """Read `tokenizer.json` and `tokenizer_config.json` of a checkpoint directory.

    Args:
        path: the directory; without a `tokenizer.json` the tokenizer is empty.
        config: for the begin token and the vocabulary.

    Raises:
        CheckpointError: a file is damaged, or the tokenizer has more tokens than the model.
    """
    file = path / "tokenizer.json"
    if not file.exists() and not file.is_symlink():  # a dangling link is damage
        return Tokenizer(None)
    try:
        backend = Backend.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file}: is not a tokenizer ({error})") from None
    backend.no_truncation()  # a prompt is taken whole, whatever the file was trained with
    backend.no_padding()
    size = backend.get_vocab_size(with_added_tokens=True)
    if not size:
        raise CheckpointError(f"{file}: has no tokens")
    if size > config.text_config.vocab_size:
        raise CheckpointError(
            f"{file}: has {size} tokens, but vocab_size is {config.text_config.vocab_size}; it belongs to another model"
        )
    return Tokenizer(backend, config.bos_token_id if _adds_bos(path / "tokenizer_config.json") else None)


def _adds_bos(file: Path) -> bool:
    if not file.exists():
        return False
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON ({error})") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: holds a {type(settings).__name__}; a JSON object is needed")
    adds = settings.get("add_bos_token", False)
    if not isinstance(adds, bool):
        raise CheckpointError(f"{file}: add_bos_token is {adds!r}; true or false is needed")
    return adds
