"""Which rows of the Engram tables a token looks up: token map, primes, multipliers, hash (spec 3.9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice
from math import isqrt

import numpy as np
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import NFD, NFKC, Lowercase, Replace, Sequence, Strip, StripAccents
from torch import Tensor

from minideepinfer.config import ModelConfig, TextConfig
from minideepinfer.errors import CheckpointError

_LONE_SPACE = "\ue000"
_NORMALIZER = Sequence(
    [
        NFKC(),
        NFD(),
        StripAccents(),
        Lowercase(),
        Replace(Regex(r"[ \t\r\n]+"), " "),
        Replace(Regex(r"^ $"), _LONE_SPACE),
        Strip(),
        Replace(_LONE_SPACE, " "),
    ]
)


def token_map(tokenizer: Tokenizer) -> list[int]:
    """Map every token id to the number of its normalised text, in order of first appearance.

    Args:
        tokenizer: the checkpoint's tokenizer; ids `0 .. len - 1` are taken, added tokens included.

    Returns:
        One compressed id per token id.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token_id] for token_id in range(size)], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    return [numbers.setdefault(_key(tokenizer, i, text), len(numbers)) for i, text in enumerate(texts)]


def _key(tokenizer: Tokenizer, token_id: int, text: str) -> str:
    if "\ufffd" in text:
        return tokenizer.id_to_token(token_id) or ""
    return _NORMALIZER.normalize_str(text) or text


def _primes_from(start: int) -> Iterator[int]:
    return (n for n in count(max(start, 2)) if all(n % divisor for divisor in range(2, isqrt(n) + 1)))


@dataclass(frozen=True)
class HashConstants:
    """The numbers behind one Engram layer's hash.

    Attributes:
        multipliers: one odd factor per history token, newest first.
        primes: buckets of each column, columns ordered by n-gram order, then head.
        offsets: first table row of each column.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]


def hash_constants(config: TextConfig) -> tuple[HashConstants, ...]:
    """Derive the constants of every Engram layer; primes ascend through all layers and are never used twice.

    Raises:
        CheckpointError: the primes of a layer do not add up to its `engram_num_embeddings`.
    """
    primes = _primes_from(config.engram_vocab_size)
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    constants = []
    for layer_id, table_rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        buckets = tuple(islice(primes, config.engram_columns))
        if sum(buckets) != table_rows:
            raise CheckpointError(
                f"Engram layer {layer_id}: {len(buckets)} primes from {buckets[0]} on add up to {sum(buckets)} rows, "
                f"engram_num_embeddings says {table_rows}; check engram_vocab_size {config.engram_vocab_size}"
            )
        draw = np.random.default_rng(10007 * layer_id).integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
        offsets = accumulate(buckets[:-1], initial=0)
        constants.append(HashConstants(tuple(2 * int(v) + 1 for v in draw), buckets, tuple(offsets)))
    return tuple(constants)


class EngramHash:
    """Table rows of tokens, for all Engram layers of a model.

    Attributes:
        constants: of each Engram layer, in order of `engram_layer_ids`.
        pad: compressed id that stands for "no token here".
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, device: torch.device | str = "cpu") -> None:
        """Build the token map and check it.

        Args:
            config: the checkpoint's config.
            tokenizer: the checkpoint's own; None = it has none, then ids are taken modulo
                `engram_compressed_vocab_size` (spec 8).
            device: where `rows` computes.

        Raises:
            CheckpointError: the map has another number of ids than `engram_compressed_vocab_size`, or a layer's primes
                do not fit its table.
        """
        text = config.text_config
        compressed = text.engram_compressed_vocab_size
        self.constants = hash_constants(text)
        mapped = [i % compressed for i in range(text.vocab_size)] if tokenizer is None else token_map(tokenizer)
        if tokenizer is not None and max(mapped) + 1 != compressed:
            raise CheckpointError(
                f"Engram token map: tokenizer.json gives {max(mapped) + 1} compressed ids over {len(mapped)} tokens, "
                f"engram_compressed_vocab_size is {compressed}; the tokenizer does not belong to this checkpoint"
            )
        self.pad = mapped[text.engram_pad_token_id]
        # Embedding rows behind the tokenizer's last id stand for no text: they hash as padding does.
        mapped += [self.pad] * (text.vocab_size - len(mapped))
        self._blocked = torch.zeros(len(mapped), dtype=torch.bool, device=device)
        if config.image_token_id < len(mapped):
            self._blocked[config.image_token_id] = True
        self._map = torch.tensor(mapped, dtype=torch.int64, device=device)
        self._heads = text.engram_n_heads
        self._layers = [
            tuple(torch.tensor(numbers, device=device) for numbers in (layer.multipliers, layer.primes, layer.offsets))
            for layer in self.constants
        ]

    def rows(self, history: Tensor) -> list[Tensor]:
        """Hash n-grams that end at each token.

        A position before the start or an image token counts as padding, and so does everything older than it.

        Args:
            history: int64 `[T, engram_max_ngram_size]` on this hash's device: ids at p, p - 1, ...; -1 before the
                start.

        Returns:
            For each Engram layer int64 `[T, columns]`, rows of its table, offsets included; columns are ordered by
            n-gram order (2, 3, ...), then head.
        """
        known = history.clamp(min=0)
        blocked = ((history < 0) | self._blocked[known]).cumsum(dim=1) > 0
        tokens = torch.where(blocked, self.pad, self._map[known])
        return [self._layer_rows(tokens, *layer) for layer in self._layers]

    def _layer_rows(self, tokens: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
        newest, *older = (tokens * multipliers).unbind(1)
        orders = list(accumulate(older, torch.bitwise_xor, initial=newest))[1:]
        columns = torch.stack(orders, dim=1).repeat_interleave(self._heads, dim=1)
        return columns % primes + offsets
