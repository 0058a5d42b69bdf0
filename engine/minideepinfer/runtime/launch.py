"""A command on several ranks of this machine, through torch.distributed's launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence

from minideepinfer.errors import RankError

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def is_rank() -> bool:
    """Whether this process was started as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch(arguments: Sequence[str], num_processes: int) -> int:
    """Run `mini-deepinfer` with the same arguments in each of some new processes, which are ranks 0, 1, ...

    When one fails the others are ended. Cores are shared out among them, unless `OMP_NUM_THREADS` is set.

    Args:
        arguments: of the command line.
        num_processes: how many.

    Returns:
        0 if all have ended well.

    Raises:
        RankError: a rank failed or was killed, or this process was ended by a signal; says which, and why.
        KeyboardInterrupt: Ctrl-C.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    logging.disable(logging.ERROR)  # what goes wrong is said once, by what is raised here
    try:
        elastic_launch(config, sys.executable)("-m", "minideepinfer", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            cause = f"was ended by {signal.Signals(-failure.exitcode).name}"
        elif failure.error_file_data.get("message"):
            raise RankError(str(failure.message)) from None
        else:
            cause = f"ended with exit code {failure.exitcode}; what it printed says why"
        raise RankError(f"rank {rank} of {num_processes} {cause}") from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RankError(
            f"{signal.Signals(error.sigval).name} ended this process and its {num_processes} ranks"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return 0


def report(error: Exception) -> bool:
    """Leave an error of a rank to the launcher, which shows the first one.

    Returns:
        Whether there is a launcher that takes it.
    """
    file = os.environ.get(_ERROR_FILE)
    if not file:
        return False
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    message = str(error) if isinstance(error, RankError) else f"rank {rank} of {size} failed: {error}"
    with open(file, "w", encoding="utf-8") as stream:
        json.dump({"message": message, "timestamp": int(time.time())}, stream)
    return True
