"""The schema of a golden set's `manifest.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from minideepinfer.config.model import describe
from minideepinfer.errors import VerificationError

MANIFEST = "manifest.json"


def _plain(name: str) -> str:
    if Path(name).name != name or name in ("", ".."):
        raise ValueError(f"{name!r} is not the name of a file in the set's directory")
    return name


FileName = Annotated[str, AfterValidator(_plain)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Bounded(_Section):
    """Outputs in bounded replay: the prompt's length, and the file."""

    prompt: int = Field(gt=0)
    file: FileName


class Draft(_Section):
    """Outputs of the draft, by run."""

    files: dict[str, FileName]


class GoldenSequence(_Section):
    """One sequence of a set.

    Attributes:
        name: e.g. `s101`.
        token_ids: all its tokens.
        probe_positions: positions of which most tensors hold rows; None = all.
        files: file by run.
        bounded: in bounded replay, if recorded.
        dspark: of the draft, if recorded.
        teacher_forced: by `RUN inputs into RUN`, the errors of the oracle's own modules, by module and layer.
    """

    name: str
    token_ids: list[int] = Field(min_length=1)
    probe_positions: list[int] | None = None
    files: dict[str, FileName] = Field(default_factory=dict)
    bounded: Bounded | None = None
    dspark: Draft | None = None
    teacher_forced: dict[str, dict[str, list[float]]] = Field(default_factory=dict)


class Manifest(_Section):
    """What `manifest.json` must say; whatever else it says is left alone."""

    config: dict[str, Any]
    sequences: list[GoldenSequence] = Field(min_length=1)
    sha256: dict[FileName, str]


def read_manifest(file: Path) -> Manifest:
    """Read a set's manifest.

    Raises:
        VerificationError: it cannot be read, is not JSON or lacks something.
    """
    try:
        return Manifest.model_validate(json.loads(file.read_bytes()))
    except OSError as error:
        raise VerificationError(
            f"{file}: cannot be read ({error.strerror or error}); a golden set has it beside its checkpoint"
        ) from None
    except ValidationError as error:
        raise VerificationError(f"{file}: {describe(error)}") from None
    except ValueError as error:
        raise VerificationError(f"{file}: is not JSON ({error})") from None
