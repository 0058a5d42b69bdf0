"""Golden sets changed for a test: links to the repository's files, and copies of what changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "data/golden"


def linked_set(source: Path, target: Path) -> Path:
    """A directory whose files are links to those of a set."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    return target


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a linked set's manifest."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_bytes())
    change(manifest)
    file.unlink()
    file.write_text(json.dumps(manifest))


def change_tensors(path: Path, name: str, change: Callable[[dict[str, Tensor]], object], *, sign: bool = True) -> None:
    """Rewrite a file of a linked set; with `sign` the manifest gets its new checksum."""
    file = path / name
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file)
    if sign:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        change_manifest(path, lambda manifest: manifest["sha256"].update({name: digest}))
