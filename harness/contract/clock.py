"""What time it is for a recording: the wall clock, or the clock of a loop whose time is simulated.

Stacks in processes of their own write down wall-clock times, and so does the driver. An inline stack (`harness/driving/inline.py`)
may be driven on a `SimulatedLoop`: nothing waits then, a deadline of a minute passes in no time, and every run of the same
calls gives the same recording.
"""

from __future__ import annotations

import asyncio
import selectors
import time

EPOCH_NS = 1_600_000_000 * 10**9
"""When simulated time begins, so that its times look like times."""
TICK_NS = 1_000
"""How much later each reading of a simulated clock is than the one before: events are in one order."""


class _Jumping(selectors.DefaultSelector):
    """Where it would wait for a timer, it adds the time to `seconds` instead."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("nothing is left that could ever happen, and something is awaited")
        if not events and timeout is not None:
            self.seconds += timeout
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: where it would, its clock jumps to the next timer.

    (looptime does the same and registers three pytest plugins with everybody who installs this project;
    async-solipsism is under the GPL.)
    """

    def __init__(self) -> None:
        self._waits = _Jumping()
        self._read_ns = 0
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.seconds

    def read_ns(self) -> int:
        """The simulated time, later at each reading."""
        self._read_ns = max(self._read_ns + TICK_NS, int(self._waits.seconds * 1e9))
        return EPOCH_NS + self._read_ns


def now_ns() -> int:
    """Nanoseconds since the epoch, by the clock of the running loop."""
    loop = asyncio.get_running_loop()
    return loop.read_ns() if isinstance(loop, SimulatedLoop) else time.time_ns()


def monotonic() -> float:
    """Seconds of the running loop's clock, from an arbitrary start."""
    return asyncio.get_running_loop().time()
