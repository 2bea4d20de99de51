"""Fixtures of the tests in the stacks' environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.driving.models import tiny_model
from harness.machine.progress import console_progress
from tests.real.scripts import REFERENCE, Scripts, interpreter


@pytest.fixture(scope="session")
def model() -> Path:
    """The tiny model."""
    return tiny_model(interpreter(), console_progress())


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Runs a script in an environment, by default the reference's. Returns the JSON in the last line that it prints."""
    started: dict[str, Scripts] = {}
    scratch = tmp_path_factory.mktemp("scripts")

    def run(script: str, *arguments: object, environment: str = REFERENCE) -> Any:
        if environment not in started:
            started[environment] = Scripts(environment, scratch)
        return started[environment].run(script, *arguments)

    yield run
    for one in started.values():
        one.end()
