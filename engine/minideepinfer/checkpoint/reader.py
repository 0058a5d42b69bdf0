"""Reading tensors out of a verified checkpoint: one at a time, only those that are asked for."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minideepinfer.checkpoint.layout import ROW_GROUP
from minideepinfer.checkpoint.shards import StoredTensor
from minideepinfer.checkpoint.verify import Inventory, Summary, verify
from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError
from minideepinfer.operators import PackedExperts
from minideepinfer.quantization import decode_fp8_blocks

PIECE_BYTES = 64 << 20
"""Bytes that are read and checked at once; bounds what a check or a copy to a device needs beside the result."""

_TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}


class Checkpoint:
    """A directory of the released layout, open for reading. Also a context manager.

    Attributes:
        path: the directory.
        config: its `config.json`.
        summary: tensors and bytes per kind, the skipped ones included.
        bytes_read: bytes of tensor data read so far (headers and mapped rows don't count).
    """

    path: Path
    config: ModelConfig
    summary: Summary
    bytes_read: int

    def __init__(self, inventory: Inventory) -> None:
        self.path = inventory.path
        self.config = inventory.config
        self.summary = inventory.summary
        self.bytes_read = 0
        self._tensors = inventory.tensors
        self._shard: BufferedReader | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read and verify config, index and shard headers; no tensor data is read.

        Args:
            path: a directory, or `"tiny"`, see `minideepinfer.checkpoint.verify.directory_of`.

        Raises:
            ConfigError, CheckpointError: see `minideepinfer.checkpoint.verify.verify`.
        """
        return cls(verify(path))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fingerprint(self) -> str:
        """Differs where config, tokenizer, or name, type, shape or place of a tensor differ, whatever its values."""
        found = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in (self.path / name for name in ("tokenizer.json", "tokenizer_config.json")):
            found.update(file.read_bytes() if file.is_file() else b"absent")
        for stored in sorted(self._tensors.values(), key=lambda stored: stored.name):
            found.update(f"{stored} {stored.dtype} {stored.shape} {stored.offset}\n".encode())
        return found.hexdigest()[:16]

    def close(self) -> None:
        """Close the open shard. Tensors that were returned, mapped ones included, stay valid."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Args:
            name: as in the index.

        Returns:
            CPU tensor of the stored shape: bfloat16, float32 or float8_e4m3fn; E8M0 exponents and packed FP4 as uint8.

        Raises:
            CheckpointError: no such tensor, the shard changed since `open`, or a value is NaN or infinite.
        """
        stored = self._find(name)
        raw = self._bytes(stored, torch.device("cpu"), 0, stored.nbytes)
        return raw.view(_TORCH_DTYPES[stored.dtype]).reshape(stored.shape)

    def dense(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Read and decode a weight matrix.

        Args:
            name: without `.weight`, e.g. `layers.0.attn.wq_a`.
            dtype: of the result; the decoded values are exact in bfloat16 and wider.
            device: of the result; FP8 is decoded there.

        Returns:
            `[out, in]` in `dtype`.

        Raises:
            CheckpointError: see `tensor`.
        """
        weight = self.tensor(f"{name}.weight").to(device)
        if weight.dtype is not torch.float8_e4m3fn:
            return weight.to(dtype)
        scale = self.tensor(f"{name}.scale").to(device)
        return decode_fp8_blocks(weight, scale, dtype, self.config.quantization_config.weight_block_size)

    def experts(self, prefix: str, ids: range, device: torch.device) -> PackedExperts:
        """Read routed experts as they are stored, expert by expert into one allocation per matrix.

        Args:
            prefix: e.g. `layers.3.ffn.experts`.
            ids: consecutive expert ids of this rank; may be empty.
            device: of the result.

        Raises:
            CheckpointError: see `tensor`.
        """
        hidden, inner = self.config.text_config.hidden_size, self.config.text_config.moe_intermediate_size

        def allocate(*shape: int) -> Tensor:
            return torch.empty(len(ids), *shape, dtype=torch.uint8, device=device)

        packed = PackedExperts(
            w13=allocate(2, inner, hidden // 2),
            w13_scale=allocate(2, inner, hidden // ROW_GROUP),
            w2=allocate(hidden, inner // 2),
            w2_scale=allocate(hidden, inner // ROW_GROUP),
            expert_start=ids.start,
        )
        for local, expert in enumerate(ids):
            for part, weight, scale in (
                ("w1", packed.w13[local, 0], packed.w13_scale[local, 0]),
                ("w3", packed.w13[local, 1], packed.w13_scale[local, 1]),
                ("w2", packed.w2[local], packed.w2_scale[local]),
            ):
                weight.copy_(self.tensor(f"{prefix}.{expert}.{part}.weight"))
                scale.copy_(self.tensor(f"{prefix}.{expert}.{part}.scale"))
        return packed

    def num_rows(self, name: str) -> int:
        """Rows of a table, of all ranks together.

        Raises:
            CheckpointError: no such tensor.
        """
        return self._find(name).shape[0]

    def row_table(
        self,
        name: str,
        placement: Literal["device", "host", "mmap"],
        device: torch.device,
        rows: range | None = None,
    ) -> Tensor:
        """The raw rows of a table, e.g. `layers.1.engram.embed.weight` or its `.scale`.

        A mapped table never enters memory whole. Its exponents are read once, in pieces, to refuse NaN bytes; its
        weights are not read here, so a NaN code among them shows only in the row that holds it.

        Args:
            name: as in the index.
            placement: `device` copies the rows to `device`, `host` to memory, `mmap` maps the file, read-only.
            device: the compute device.
            rows: consecutive rows wanted (a rank's shard); None = all.

        Returns:
            uint8 `[rows, row_bytes]`. A mapped table must not be written to.

        Raises:
            CheckpointError: see `tensor`.
        """
        stored = self._find(name)
        rows = range(stored.shape[0]) if rows is None else rows
        row_bytes = stored.nbytes // max(stored.shape[0], 1)
        start, stop = rows.start * row_bytes, rows.stop * row_bytes
        if placement != "mmap" or start == stop:
            target = device if placement == "device" else torch.device("cpu")
            return self._bytes(stored, target, start, stop).view(len(rows), row_bytes)
        if stored.dtype == "F8_E8M0":
            for _ in self._pieces(stored, start, stop):
                pass
        return _map(stored, stored.offset + start, (len(rows), row_bytes))

    def _find(self, name: str) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        if stored.dtype not in _TORCH_DTYPES:
            raise CheckpointError(f"{stored}: has dtype {stored.dtype}; only {', '.join(_TORCH_DTYPES)} are read")
        return stored

    def _bytes(self, stored: StoredTensor, device: torch.device, start: int, stop: int) -> Tensor:
        result = torch.empty(stop - start, dtype=torch.uint8, device=device)
        for at, piece in self._pieces(stored, start, stop):
            result[at - start : at - start + len(piece)].copy_(piece)
        return result

    def _pieces(self, stored: StoredTensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Read bytes `start..stop` of a tensor in checked pieces; each is overwritten by the next one."""
        buffer = torch.empty(min(PIECE_BYTES, stop - start), dtype=torch.uint8)
        for at in range(start, stop, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, stop - at)]
            self._fill(stored, at, piece)
            _check_values(stored, at, piece)
            yield at, piece

    def _fill(self, stored: StoredTensor, start: int, piece: Tensor) -> None:
        try:
            shard = self._open(stored.file)
            shard.seek(stored.offset + start)
            count = shard.readinto(piece.numpy().data)
        except OSError as error:
            raise CheckpointError(f"{stored}: cannot be read ({error.strerror or error})") from None
        if count != len(piece):
            raise CheckpointError(
                f"{stored}: {count} of {len(piece)} bytes could be read; the file was truncated after it was opened"
            )
        self.bytes_read += count

    def _open(self, file: Path) -> BufferedReader:
        """One shard is open at a time."""
        if self._shard is None or self._shard.name != str(file):
            self.close()
            self._shard = BufferedReader(FileIO(str(file)))
        return self._shard


def _map(stored: StoredTensor, offset: int, shape: tuple[int, int]) -> Tensor:
    # Read-only: a writable private mapping larger than memory is refused by Linux' default overcommit rule.
    try:
        rows = np.memmap(stored.file, dtype=np.uint8, mode="r", offset=offset, shape=shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{stored}: cannot be mapped ({error})") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(rows)


def _check_values(stored: StoredTensor, start: int, piece: Tensor) -> None:
    """Refuse NaN and infinity; packed FP4 has neither."""
    if stored.dtype == "I8":
        return
    if stored.dtype == "F8_E8M0":
        bad = piece == 255
    elif stored.dtype == "F8_E4M3":
        bad = (piece & 0x7F) == 0x7F
    else:
        bad = ~piece.view(_TORCH_DTYPES[stored.dtype]).isfinite()
    if bad.any():
        element = start // (len(piece) // len(bad)) + int(bad.int().argmax())
        what = "the scale byte 255 (NaN)" if stored.dtype == "F8_E8M0" else "NaN or infinity"
        raise CheckpointError(f"{stored}: element {element} of {stored.dtype} {list(stored.shape)} is {what}")
