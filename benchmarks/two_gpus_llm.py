"""A job of `two_gpus.py`: what `LLM` computes on the ranks that there are, kept for a comparison.

python benchmarks/two_gpus_llm.py MODEL --device cpu --out FILE
torchrun --nproc-per-node 2 benchmarks/two_gpus_llm.py MODEL --device cpu --comm collective --out FILE
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from minideepinfer import LLM, EngineConfig, SamplingParams

LENGTHS = (9, 1, 30, 4, 2)


def main() -> None:
    """Logits of five sequences, and five tokens behind each; on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--comm", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    naive = dict.fromkeys(("attention", "indexer", "moe", "residual", "epilogue"), "naive")
    settings: dict[str, Any] = {
        "dtype": "float32",
        "kv_quantization": "none",
        "device": arguments.device,
        "max_tokens_per_step": 7,
        "cache": {"num_pages": 32, "max_requests": 4},
        "parallel": {"expert": ranks, "timeout_seconds": 60.0},
        "ops": naive | {"comm": arguments.comm},
    }
    sequences = [[5 + (7 * i + j) % 80 for j in range(length)] for i, length in enumerate(LENGTHS)]
    with LLM(arguments.model, EngineConfig(**settings)) as llm:
        logits = llm.forward(sequences, num_prompt_tokens=[6, 1, 30, 2, 1])
        tokens = [output.token_ids for output in llm.generate(sequences, SamplingParams(max_tokens=5))]
    torch.save({"logits": [each.cpu() for each in logits], "tokens": tokens}, arguments.out)


if __name__ == "__main__":
    main()
