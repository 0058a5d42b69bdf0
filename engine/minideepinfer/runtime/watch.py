"""A thread that says that its rank lives, and notices when another one does not."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

POISON = b"\0\0\0\0"
"""What a key is given, with a verdict behind it, to wake those that wait for it in vain."""


class Watch(threading.Thread):
    """Looks at the other ranks through the store, several times a second.

    What it finds is the `verdict`: that a rank has reported a fault, has given no sign of life, or did not come to an
    exchange or a collective in time. The first one that is found by any rank is that of all. A main thread that waits
    in the store is woken; one that is still stuck elsewhere after `patience` (after `grace` if its collective was given
    up) is ended together with its process. So nothing hangs, whatever library the main thread is in.

    Attributes:
        verdict: what has gone wrong, or nothing.
        patience: seconds that a rank waits for others in a step.
        grace: seconds that it gives them when something has gone wrong.
        store_gone: the store has failed, or does not answer; whoever asks it may wait for ever.
        gave_up: whether a collective of this rank has waited in vain, asked where the main thread may be unable to
            tell: it waits for the device, on which the collective runs.

    Args:
        store: a connection of this thread's own to the ranks' key-value store.
        rank: this one.
        size: ranks in all.
        timeout: seconds within which all ranks must have stopped.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        super().__init__(name="mini-deepinfer watch", daemon=True)
        self.verdict = ""
        self.decided = threading.Event()
        self.patience, self.grace = timeout * 0.4, timeout / 8
        self._interval = min(0.25, timeout / 80)
        self._silence = timeout / 4
        self._short_silence = timeout / 10
        self._store, self._rank, self._size = store, rank, size
        self._beats = 0
        self._decided_at = 0.0
        self._absent: list[int] = []
        self.store_gone = False
        self.gave_up: Callable[[], bool] = lambda: False
        self._gave_up_at: float | None = None
        self._noticed = False
        self._looked = time.monotonic()
        self._seen = [(b"", time.monotonic()) for _ in range(size)]
        self._awaited: tuple[Sequence[str], float] | None = None
        self._busy_since: float | None = None
        self._ended = threading.Event()

    def beat(self) -> None:
        """Say that this rank lives."""
        self._beats += 1
        self._store.set(f"beat/{self._rank}", str(self._beats))

    def start(self) -> None:
        """Begin to look; a second thread sees to it that this one is not stuck in the store."""
        self._looked = time.monotonic()
        super().start()
        threading.Thread(target=self._guard, name="mini-deepinfer guard", daemon=True).start()

    def _guard(self) -> None:
        late = 0
        while not self._ended.wait(self._interval):
            late = late + 1 if time.monotonic() - self._looked > self._silence else 0
            if late > 2 and not self.verdict:  # once is not enough: this process may have been stopped
                self.store_gone = True
                self._decide(f"{self._the_store()} does not answer")
            if self.verdict:
                self._end_stuck()

    def run(self) -> None:
        """Look again and again until `stop`."""
        while not self._ended.wait(self._interval):
            try:
                if not self.store_gone:
                    self._look()
                self._looked = time.monotonic()
            except RuntimeError as error:  # what the store raises
                self.store_gone = True  # each further try would write a long trace to stderr
                reason = str(error).partition("\n")[0]
                self._decide(f"{self._the_store()} is gone ({reason})")

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join(self.grace)

    def enter(self) -> None:
        """The main thread begins something that all ranks do together."""
        self._busy_since = time.monotonic()

    def leave(self) -> None:
        """The main thread is out of it."""
        self._busy_since = None

    def await_keys(self, keys: Sequence[str], seconds: float | None) -> None:
        """The main thread waits for keys, one of each rank that must set one; None = as long as it takes."""
        self._awaited = (keys, time.monotonic() + seconds if seconds is not None else float("inf"))

    def arrived(self) -> None:
        """It waits no more."""
        self._awaited = None

    def notice(self) -> None:
        """The main thread has met an error, so it is not stuck: it says so itself, and gets `patience` to leave."""
        self._noticed = True

    def settle(self, met: str) -> str:
        """What has gone wrong, now that something has; waits until this is known, but not longer than the grace.

        Args:
            met: the error that this rank has met, which is told if nobody reports another cause.
        """
        self._silence = self._short_silence
        if not self.decided.wait(self.grace):
            self._blame(met)
        return self.verdict

    def wait_for_others(self) -> None:
        """Wait until the others have left, are silent or absent, but not longer than the grace."""
        end = time.monotonic() + self.grace
        with suppress(RuntimeError):
            while (
                not self.store_gone
                and time.monotonic() < end
                and set(self._without("left/")) - {*self._silent(), *self._absent}
            ):
                time.sleep(self._interval / 4)
        if self._absent:
            time.sleep(2 * self._interval)  # their watches may still read the verdict

    def _look(self) -> None:
        self.beat()
        now, beats = time.monotonic(), self._store.multi_get([f"beat/{rank}" for rank in range(self._size)])
        for rank, (beat, (before, when)) in enumerate(zip(beats, self._seen, strict=True)):
            self._seen[rank] = (before, when) if beat == before else (beat, now)
        if self._store.check(["fault"]):
            self._decide(self._store.get("fault").decode())
        self._look_at_collectives(now)
        if silent := self._silent():
            seconds = now - min(self._seen[rank][1] for rank in silent)
            self._decide(f"{named(silent, self._size)} has ended or hangs: no sign of life for {seconds:.1f} s")
        if awaited := self._awaited:
            keys, deadline = awaited
            if now > deadline:
                late = [int(key.rpartition("/")[2]) for key in keys if not self._store.check([key])]
                self._decide(f"{named(late, self._size)} did not come to an exchange in time")
            if self.verdict:
                for key in keys:
                    self._store.compare_set(key, "", POISON + self.verdict.encode())

    def _look_at_collectives(self, now: float) -> None:
        """What the main thread does when a collective fails: say that this rank has stopped, wait, blame the others."""
        if self._noticed:
            return
        if self._gave_up_at is None and self.gave_up():
            self._store.set(f"stopped/{self._rank}", "1")
            self._gave_up_at = now
        if self._gave_up_at is not None and now - self._gave_up_at > self.grace / 2 and not self.verdict:
            self._blame("a collective that was given up")

    def _blame(self, met: str) -> None:
        """Decide that those who have not said that they stop have brought this about."""
        self._absent = [rank for rank in range(self._size) if rank != self._rank]
        with suppress(RuntimeError):
            self._absent = self._without("stopped/")
        who = named(self._absent, self._size) if self._absent else "nobody"
        self._decide(f"{who} took part no more; what rank {self._rank} met was {met}")

    def _the_store(self) -> str:
        return f"the store of the {self._size} ranks, which rank 0 or torchrun serves,"

    def _silent(self) -> list[int]:
        now = time.monotonic()
        return [rank for rank, (_, when) in enumerate(self._seen) if now - when > self._silence and rank != self._rank]

    def _without(self, prefix: str) -> list[int]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        return [rank for rank in others if not self._store.check([f"{prefix}{rank}"])]

    def _decide(self, verdict: str) -> None:
        if not self.verdict:
            with suppress(RuntimeError):
                if not self.store_gone:
                    verdict = self._store.compare_set("fault", "", verdict).decode()
            self.verdict, self._decided_at = verdict, time.monotonic()
            self.decided.set()

    def _end_stuck(self) -> None:
        busy, patience = self._busy_since, self.patience
        if self._gave_up_at is not None and not self._noticed:
            patience = self.grace
        if busy is not None and time.monotonic() - max(busy, self._decided_at) > patience:
            print(f"mini-deepinfer: {self.verdict}; rank {self._rank} was stuck and is ended", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)


def named(ranks: Sequence[int], size: int) -> str:
    """`rank 1 of 4`, or `ranks 1, 2 of 4`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {size}"
