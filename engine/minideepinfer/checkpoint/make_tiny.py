"""Write a random checkpoint in the released layout, the same bytes for the same seed everywhere.

The gains keep the residual streams between exploding and vanishing, spread the router and make every clamp, sink and
mixing coefficient matter; they are of the size that the golden sets have.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from minideepinfer.checkpoint.layout import ROW_GROUP, TensorSpec, expected_tensors, shards
from minideepinfer.checkpoint.shards import INDEX_NAME
from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError
from minideepinfer.quantization import encode_fp8, encode_mxfp4

DEFAULT_CONFIG = Path(__file__).parents[1] / "data" / "config.tiny.json"
MAX_BYTES = 8 << 30

_MATRIX_GAINS = (
    (r"experts\.\d+\.w2|shared_experts\.w2", 0.6),
    (r"hc_(attn|ffn)_fn", 0.8),
    (r"wq_b|gate|weights_proj|\.w1|\.w3", 1.5),
    (r"wo_b|^head", 2.0),
)
"""Standard deviation of a matrix times the square root of its columns, by name; the first match counts, else 1."""


def make_tiny(directory: Path, config_file: Path = DEFAULT_CONFIG, seed: int = 0) -> int:
    """Write config, index and shards (in the released grouping, without vision and tokenizer).

    Args:
        directory: created if it does not exist; must be empty.
        config_file: the `config.json` to follow; copied byte for byte.
        seed: any non-negative integer; every tensor draws from its own stream, made of the seed and its name.

    Returns:
        Bytes of tensor data written.

    Raises:
        CheckpointError: the directory is not empty or cannot be written, or the config is not a tiny one.
        ConfigError: the config is not possible.
    """
    config = ModelConfig.from_file(config_file)
    total = sum(spec.nbytes for spec in expected_tensors(config).values())
    if total > MAX_BYTES:
        raise CheckpointError(f"{config_file}: needs {total} bytes of tensors; make-tiny writes at most {MAX_BYTES}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CheckpointError(
                f"{directory}: is not empty; a new checkpoint is written into an empty directory only"
            )
        (directory / "config.json").write_bytes(Path(config_file).read_bytes())
        _write_shards(directory, config, seed)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written ({error.strerror or error})") from None
    return total


def _write_shards(directory: Path, config: ModelConfig, seed: int) -> None:
    specs = expected_tensors(config)
    groups = shards(config)
    weight_map = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            if not name.endswith(".scale"):
                tensors.update(_tensors(specs, specs[name], seed))
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total = sum(spec.nbytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _tensors(specs: dict[str, TensorSpec], spec: TensorSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """A tensor with its scales, as stored."""
    columns = spec.shape[-1] * (2 if spec.dtype == "I8" else 1)
    values = _values(spec.name, (*spec.shape[:-1], columns), seed)
    if spec.dtype == "BF16":
        yield spec.name, values.to(torch.bfloat16)
    elif spec.dtype == "F32":
        yield spec.name, values
    else:
        scale = specs[spec.name.removesuffix(".weight") + ".scale"]
        assert scale.block is not None
        encoded = encode_mxfp4(values, ROW_GROUP) if spec.dtype == "I8" else _encode_blocks(values, scale.block)
        yield spec.name, encoded[0].view(torch.int8) if spec.dtype == "I8" else encoded[0]
        yield scale.name, encoded[1].view(torch.float8_e8m0fnu)


def _encode_blocks(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """FP8 with one power-of-two scale per block of rows x columns; edges may be ragged."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
    down, across = padded.shape[0] // block[0], padded.shape[1] // block[1]
    blocks = padded.reshape(down, block[0], across, block[1]).transpose(1, 2)
    codes, exponents = encode_fp8(blocks.reshape(down, across, -1), block[0] * block[1])
    codes = codes.reshape(blocks.shape).transpose(1, 2).reshape(padded.shape)
    return codes[:rows, :columns].contiguous(), exponents.squeeze(-1)


def _values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """What a tensor holds before it is rounded or quantised, float32."""
    noise = _noise(name, shape, seed)
    if name.endswith(("norm.weight", "engram.q_weight", "engram.k_weight")):
        return 1 + 0.2 * noise
    if name.endswith(("hc_attn_scale", "hc_ffn_scale")):
        return 1 + 0.1 * noise
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return 0.5 * noise + _mixing_base(len(noise))
    if len(shape) == 1:  # attention sink, gate bias
        return 0.2 * noise
    if name.endswith("embed.weight"):
        return 3 * noise if name == "embed.weight" else noise
    gain = next((gain for pattern, gain in _MATRIX_GAINS if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(shape[-1]) * noise


def _mixing_base(coefficients: int) -> Tensor:
    """Lean the stream mixing towards the identity, so that the four streams stay different but do mix."""
    streams = math.isqrt(coefficients + 1) - 1
    return torch.cat([torch.zeros(2 * streams), 1.5 * torch.eye(streams).flatten()])


def _noise(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Nearly normal numbers of mean 0 and variance 1, within 3.5.

    Each is the sum of the four 16-bit parts of one raw draw: numpy guarantees the raw stream of PCG64, but not the
    streams of its distributions.
    """
    stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    parts = stream.random_raw(math.prod(shape)).astype("<u8").view("<u2").reshape(*shape, 4)
    centred = parts.sum(-1, dtype=np.int64) - 2 * 65535
    return torch.from_numpy((centred / (65536 / math.sqrt(3))).astype(np.float32))
