"""What all tests of the harness rest on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Ctrl-C is to reach what tests start, also where whoever started pytest ignores it: children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
