"""Named intermediates of chosen requests, gathered over chunks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from minideepinfer.errors import RequestError


class Capture:
    """A recorder that keeps what matches its patterns, on the CPU, request by request.

    Args:
        patterns: shell patterns over names, e.g. `layers.*.attn.out`.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._offered: set[str] = set()
        self._order: list[int] = []
        self._pieces: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def begin_step(self, request_ids: Sequence[int]) -> None:
        """Say which request each number of the coming step stands for."""
        self._order = list(request_ids)

    def wants(self, name: str) -> bool:
        """Whether a pattern matches."""
        self._offered.add(name)
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def record(self, name: str, value: Tensor, request_ids: Tensor) -> None:
        """Keep the rows of each request."""
        value, owners = value.detach().cpu(), request_ids.cpu()
        for index, request_id in enumerate(self._order):
            mine = value[owners == index]
            self._pieces[request_id][name].append(mine.clone())

    def check(self) -> None:
        """Refuse a pattern that matched nothing in the steps recorded.

        Raises:
            RequestError: names the pattern and what there is.
        """
        for pattern in self.patterns:
            if self._offered and not any(fnmatchcase(name, pattern) for name in self._offered):
                raise RequestError(f"capture: {pattern!r} matches nothing; there are {_summary(self._offered)}")

    def of(self, request_id: int) -> dict[str, Tensor]:
        """Everything captured of one request, chunks joined in order."""
        return {name: torch.cat(pieces) for name, pieces in self._pieces[request_id].items()}


def _summary(names: Iterable[str]) -> str:
    """The names, those of all layers as one."""
    return ", ".join(sorted({re.sub(r"^layers\.\d+\.", "layers.L.", name) for name in names}))
