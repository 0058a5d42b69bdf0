"""One rank of a test's worlds, as a process: serves one LLM after the other, each described by a line of its input."""

from __future__ import annotations

import json
import os
import sys

import torch
from minideepinfer import LLM, EngineConfig

if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        told = json.loads(line)
        os.environ["MASTER_PORT"] = str(told["port"])
        try:
            LLM(told["path"], EngineConfig(**told["settings"]))
        except SystemExit as left:
            assert left.code == 0
            print("left", flush=True)
