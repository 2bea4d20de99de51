"""What all tests of the harness rest on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Ctrl-C is to reach what tests start, also where whoever started pytest ignores it: children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """An empty one."""
    path = tmp_path / "ledger.toml"
    path.write_text("")
    return path
