"""Set-up and fixtures of all tests of the harness."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy or not
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Restore SIGINT's default handler: if pytest's parent ignores SIGINT, the processes that tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A machine holds one real stack at a time: one worker runs all tests that start one."""
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.xdist_group("real"))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """An empty ledger."""
    path = tmp_path / "ledger.toml"
    path.write_text("")
    return path


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor sends SIGKILL soon after SIGTERM."""
    monkeypatch.setattr("harness.driving.process.GRACE_S", 0.3)
