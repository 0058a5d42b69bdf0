"""Perplexity of the packaged trained checkpoint in every precision, against the records; `--device cuda` elsewhere."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from minideepinfer import LLM, EngineConfig
from safetensors.torch import load_file

RECORDS = Path(__file__).parent.parent / "tests/data/trained"
RUNS = {
    f"{name}-{boundary}{a8}": {"dtype": dtype, "kv_quantization": kv, "activation_quantization": activations}
    for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))
    for boundary, kv in (("noq", "none"), ("q", "released"))
    for a8, activations in (("", "none"), ("-a8", "released"))
    if (boundary, a8) != ("noq", "-a8")
}


def measure(device: str) -> dict[str, dict[str, dict[str, float]]]:
    """Perplexity, the recorded one of the same run, and the largest log-probability difference, by run and text."""
    snippets = json.loads((RECORDS / "golden.json").read_text())["snippets"]
    recorded = load_file(RECORDS / "golden.safetensors")
    names = list(snippets)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for run, settings in RUNS.items():
        with LLM("tiny", EngineConfig(device=device, **settings)) as llm:
            logits = llm.forward([snippets[name]["ids"] for name in names])
        results[run] = {}
        for name, rows in zip(names, logits, strict=True):
            targets = torch.tensor(snippets[name]["ids"][1:])
            logprob = rows[:-1].log_softmax(-1).gather(1, targets[:, None])[:, 0]
            results[run][name] = {
                "perplexity": float(torch.exp(-logprob.mean())),
                "recorded": snippets[name]["perplexity"][run],
                "worst_logprob_difference": float((logprob - recorded[f"{name}.{run}.logprob"]).abs().max()),
            }
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    print(json.dumps(measure(parser.parse_args().device), indent=1))
