"""Set-up and fixtures of all tests of the harness."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ONE_WORKER = (
    "tests/real/test_death.py",
    "tests/real/",
    "tests/test_environments.py",
    "tests/test_matrix_page.py",
    "tests/test_plugin.py",
)
"""A machine holds one real stack at a time. Scripts share their imports. A kit is filled once. One browser is enough. So are one
process's runs. Of two places that hold a test, the first one counts."""

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy or not
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Restore SIGINT's default handler: if pytest's parent ignores SIGINT, the processes that tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One worker more than cores: for a third of their time, tests wait for processes that they started or ended."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take one test after the other, but one worker has all of a place in `ONE_WORKER`.

    xdist's own groups do not hold on pytest 9.2 (pytest-xdist #1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((place for place in ONE_WORKER if nodeid.startswith(place)), nodeid)

    return Scheduler(config, log)


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
