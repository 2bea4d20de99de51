"""The clock of a recording: the wall clock, or the simulated clock of an event loop.

Stacks in their own processes record wall-clock times, and so does the driver. An inline stack (`harness/driving/inline.py`)
may run on a `SimulatedLoop`. Nothing waits there: a one-minute deadline passes at once. The same calls always give the same
recording.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable

EPOCH_NS = 1_600_000_000 * 10**9
"""Nanoseconds since the epoch at which simulated time starts. Keeps simulated times plausible."""
TICK_NS = 1_000
"""Nanoseconds that each reading adds to a simulated clock, so that events have a strict order."""


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting for a timer, it adds the timeout to `seconds`, times `busy`."""

    def __init__(self, busy: Callable[[float], float]) -> None:
        super().__init__()
        self.seconds = 0.0
        self._busy = busy

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("nothing is left that could ever happen, and something is awaited")
        if not events and timeout is not None:
            self.seconds += timeout * self._busy(self.seconds)
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: its clock jumps to the next timer.

    (looptime does the same but registers three pytest plugins in every installation of this project; async-solipsism is
    under the GPL.)
    """

    def __init__(self, busy: Callable[[float], float] = lambda _seconds: 1.0) -> None:
        """`busy`: moment (seconds) → how many times as long everything takes then, as on a machine that others use too."""
        self._waits = _Jumping(busy)
        self._read_ns = 0
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.seconds

    def read_ns(self) -> int:
        """Simulated nanoseconds since the epoch. Each reading is later than the one before."""
        self._read_ns = max(self._read_ns + TICK_NS, int(self._waits.seconds * 1e9))
        return EPOCH_NS + self._read_ns


def now_ns() -> int:
    """Nanoseconds since the epoch, by the clock of the running loop."""
    loop = asyncio.get_running_loop()
    return loop.read_ns() if isinstance(loop, SimulatedLoop) else time.time_ns()


def monotonic() -> float:
    """Seconds of the running loop's clock, from an arbitrary start."""
    return asyncio.get_running_loop().time()
