"""One thread per process: the tensors are small, and threads of several test runs would fight for the cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by this process or one it starts
