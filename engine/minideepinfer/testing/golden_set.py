"""Reading a golden set: manifest, checksums, and the tensors of one sequence in one run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from minideepinfer.config import ModelConfig, TextConfig
from minideepinfer.errors import VerificationError
from minideepinfer.testing.golden_manifest import MANIFEST, GoldenSequence, Manifest, read_manifest

_CHUNK = 1 << 22


class GoldenSet:
    """A directory in the format of `golden/README.md`: a checkpoint, and what it must compute.

    Attributes:
        path: the directory.
        config: of the checkpoint.
        sequences: by name, in the manifest's order.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the manifest, compare it with the checkpoint beside it, verify every checksum.

        Raises:
            VerificationError: the manifest is missing or wrong, a file is missing or has another checksum, or the
                manifest describes another config than `config.json`.
            CheckpointError: `config.json` cannot be read.
        """
        self.path = Path(path)
        manifest = read_manifest(self.path / MANIFEST)
        self.config = ModelConfig.from_file(self.path)
        self.sequences = {sequence.name: sequence for sequence in manifest.sequences}
        self._check_config(manifest)
        self._check_sequences()
        self._check_files(manifest.sha256)

    def run(self, sequence: GoldenSequence, run: str) -> GoldenRun:
        """The outputs of a sequence in one run; the manifest must name them.

        Raises:
            VerificationError: the file cannot be read, or a tensor has an impossible shape.
        """
        file = self.path / sequence.files[run]
        return GoldenRun(file, sequence, self.config.text_config, read_tensors(file))

    def bounded(self, sequence: GoldenSequence, run: str) -> GoldenRun | None:
        """The outputs of a sequence in bounded replay, None if none are recorded of this run.

        Raises:
            VerificationError: the file cannot be read, or holds other rows than bounded replay keeps.
        """
        if sequence.bounded is None:
            return None
        file, text = self.path / sequence.bounded.file, self.config.text_config
        tensors = read_tensors(file)
        mine = {name.removeprefix(f"{run}."): t for name, t in tensors.items() if name.startswith(f"{run}.")}
        if not mine:
            return None
        kept = list(range(max(0, sequence.bounded.prompt - text.sliding_window), len(sequence.token_ids)))
        rows = tensors["rows"].tolist() if "rows" in tensors else None
        if rows != kept:
            raise VerificationError(
                f"{file}: rows is {rows}; bounded replay of a prompt of {sequence.bounded.prompt} tokens with window "
                f"{text.sliding_window} keeps {kept[0]}..{kept[-1]}"
            )
        return GoldenRun(file, sequence.model_copy(update={"probe_positions": kept}), text, mine)

    def _check_config(self, manifest: Manifest) -> None:
        where = self.path / MANIFEST
        described = ModelConfig.from_dict(manifest.config, f"{where}: config")
        if described != self.config:
            keys = _differing(described.model_dump(), self.config.model_dump())
            raise VerificationError(
                f"{where}: describes another config than {self.path / 'config.json'}; they differ in {', '.join(keys)}"
            )

    def _check_sequences(self) -> None:
        vocab = self.config.text_config.vocab_size
        for name, sequence in self.sequences.items():
            length, where = len(sequence.token_ids), f"{self.path / MANIFEST}: sequence {name}"
            if wrong := [i for i in sequence.token_ids if not 0 <= i < vocab]:
                raise VerificationError(f"{where}: token ids {wrong} are outside the vocabulary of {vocab}")
            probes = sequence.probe_positions
            if probes is not None and (probes != sorted(set(probes)) or not all(0 <= p < length for p in probes)):
                raise VerificationError(f"{where}: probe_positions do not ascend within its {length} tokens")
            if sequence.bounded and sequence.bounded.prompt > length:
                raise VerificationError(f"{where}: bounded.prompt {sequence.bounded.prompt} exceeds {length} tokens")

    def _check_files(self, checksums: dict[str, str]) -> None:
        named = [file for s in self.sequences.values() for file in s.files.values()]
        named += [s.bounded.file for s in self.sequences.values() if s.bounded]
        for file in named:
            if file not in checksums:
                raise VerificationError(f"{self.path / MANIFEST}: names {file} but has no sha256 of it")
        for file, expected in checksums.items():
            if (found := _sha256(self.path / file)) != expected:
                raise VerificationError(f"{self.path / file}: sha256 is {found}, {MANIFEST} says {expected}")


class GoldenRun:
    """The tensors of one sequence in one run.

    Attributes:
        file: where they come from.
        sequence: the sequence.
        tensors: by name, on the CPU.
        probes: int64 `[P]`, positions of the rows that most tensors hold.
    """

    def __init__(self, file: Path, sequence: GoldenSequence, text: TextConfig, tensors: dict[str, Tensor]) -> None:
        """Check the shapes of a file's tensors; see `GoldenSet.run`."""
        self.file = file
        self.sequence = sequence
        self.tensors = tensors
        length = len(sequence.token_ids)
        probes = range(length) if sequence.probe_positions is None else sequence.probe_positions
        self.probes = torch.tensor(list(probes), dtype=torch.int64)
        widths = _widths(text)
        for name, tensor in tensors.items():
            kind = ".".join(name.split(".")[2:]) if name.startswith("layers.") else name
            width = widths.get(kind)
            if width is not None and tuple(tensor.shape[1:]) != width:
                raise VerificationError(
                    f"{file}: {name} has shape {list(tensor.shape)}; rows of shape {width} are needed"
                )

    def get(self, name: str) -> Tensor | None:
        """A tensor as it lies in the file, None if the file lacks it."""
        return self.tensors.get(name)

    def positions(self, name: str) -> Tensor:
        """Positions of a token tensor's rows, int64.

        Raises:
            VerificationError: it has neither a row for every token nor one for every probe position.
        """
        rows, length = len(self.tensors[name]), len(self.sequence.token_ids)
        if rows == length:
            return torch.arange(length)
        if rows == len(self.probes):
            return self.probes
        raise VerificationError(
            f"{self.file}: {name} has {rows} rows; {length} (every token) or {len(self.probes)} (every probe position) "
            "are possible"
        )

    def whole(self, name: str) -> Tensor | None:
        """A tensor with a row for every token, None if the file lacks that."""
        tensor = self.get(name)
        return tensor if tensor is not None and len(self.positions(name)) == len(self.sequence.token_ids) else None

    def probed(self, name: str) -> Tensor | None:
        """A tensor's rows at the probe positions, None if the file lacks it."""
        tensor = self.get(name)
        if tensor is None:
            return None
        return tensor if len(self.positions(name)) == len(self.probes) else tensor[self.probes]


def _widths(text: TextConfig) -> dict[str, tuple[int, ...]]:
    """Shape of a row, of tensors that are fed into modules."""
    streams, hidden, chosen = (text.hc_mult, text.hidden_size), (text.hidden_size,), (text.num_experts_per_tok,)
    return {
        **dict.fromkeys(("embed", "final.normed", "attn.in", "attn.out", "ffn.in", "ffn.out"), hidden),
        **dict.fromkeys(("streams_out", "engram.streams_out"), streams),
        **dict.fromkeys(("ffn.expert_ids", "ffn.expert_weights"), chosen),
        "next_pre_mix": (text.hc_mult,),
        "attn.compressed_kv": (text.head_dim,),
        "index.keys": (text.index_head_dim,),
    }


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a file.

    Raises:
        VerificationError: it cannot be read.
    """
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise VerificationError(f"{file}: cannot be read as safetensors ({error})") from None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise VerificationError(f"{file}: cannot be read ({error.strerror or error}), {MANIFEST} names it") from None
    return digest.hexdigest()


def _differing(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in one:
        if isinstance(one[key], dict) and isinstance(other[key], dict):
            keys += _differing(one[key], other[key], f"{prefix}{key}.")
        elif one[key] != other[key]:
            keys.append(prefix + key)
    return keys
