"""Drives single scenarios on the miniature, correct or broken, without pytest's items, as `parity prove` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.contract.messages import Dtype
from harness.contract.topology import topology
from harness.machine.progress import silent
from harness.machine.targets import known
from harness.running import catalogue
from harness.running.session import Options, Seat, Session
from harness.suite.scenario import Scenario


class Bench:
    """One session on one target; a fault stays until another one is injected."""

    def __init__(self, session: Session, target: str) -> None:
        self.session, self.target = session, target

    def seat(self, scenario: Scenario) -> Seat:
        return Seat(target=self.target, topology=scenario.driven_in(2)[0])

    def inject(self, fault: str | None) -> int:
        """Switch to a fault. Returns how often the previous fault took effect."""
        seat = Seat(target=self.target, topology=topology("disaggregated"))
        return self.session.inject(seat, None if fault is None else known(self.target).seeded()[fault])

    def drive(self, scenario: Scenario | str, body=None):
        """The verdicts of a declared scenario (by name) or of a made-up one."""
        if isinstance(scenario, str):
            scenario, body = catalogue.declared()[scenario], catalogue.body(scenario)
        return self.session.drive(scenario, self.seat(scenario), body)

    def red(self, scenario: Scenario | str, body=None) -> dict[str, str]:
        """check → reason, for red verdicts."""
        return {v.check: v.reason for v in self.drive(scenario, body) if v.red}

    def trace(self, scenario: str):
        [trace] = self.session.driven(catalogue.declared()[scenario], self.seat(catalogue.declared()[scenario]))
        return trace


@contextmanager
def bench(folder: Path, target: str = "miniature", *, repeat: int = 1, dtype: Dtype | None = None) -> Iterator[Bench]:
    """A session without recordings."""
    options = Options(
        baseline=target,
        candidate=target,
        stacks=[target],
        engine="cpu",
        dtype=dtype,
        run_dir=folder,
        repeat=repeat,
        fault_taps=True,
        record=False,
    )
    session = Session(options, silent)
    try:
        yield Bench(session, target)
    finally:
        session.close()
