"""The verdicts on one scenario in one topology, from its recordings, during the run or years later.

First each stack is judged alone, take by take: the scenario's checks, then those of every scenario. The worst take stands for
the stack. Then the candidate is compared with the baseline, since outputs may be compared only if both keep their promises.
`harness/running/run.py` adds what needs the whole run: ledger, pace, unexercised capabilities, gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import final

import msgspec

from harness.checks.base import Evidence
from harness.contract.errors import Blame
from harness.contract.topology import Topology
from harness.judging.judge import absent, judge_evidence, missing
from harness.judging.parity import Absent, Judged, Missing, Side, compare, unsettled
from harness.judging.takes import merge
from harness.records.book import Book
from harness.records.index import Index
from harness.records.recording import CallError, ScenarioTrace
from harness.records.verdict import NoiseFloor, RunInfo, Verdict
from harness.suite.scenario import Scenario


@final
class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The recordings of one seat with the oracle's answers about them."""

    index: Index
    book: Book

    @property
    def target(self) -> str:
        return self.index.header.target

    @property
    def topology(self) -> str:
        return self.index.header.topology.name

    @property
    def shape(self) -> Topology:
        """The topology without its description."""
        return msgspec.structs.replace(self.index.header.topology, about="")


Look = Callable[[Evidence, Sequence[Verdict]], None]


@final
class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """All takes of one stack as one side: the first take's evidence, the verdicts of all, and the second take, if any, as the twin."""

    side: Side
    verdicts: list[Verdict]
    twin: ScenarioTrace | None


class Judging:
    """Judges one topology of a run. `here`: target → its recording, for targets that have one."""

    def __init__(
        self, info: RunInfo, topology: str, here: Mapping[str, Recorded], look: Look = lambda *_: None
    ) -> None:
        """`look` gets each take with its verdicts."""
        self._info, self._topology, self._here, self._look = info, topology, here, look

    def scenario(self, scenario: Scenario, noise: Sequence[NoiseFloor]) -> Iterator[Verdict]:
        """All verdicts: each stack alone, then the candidate against the baseline if the run has two."""
        baseline, candidate = self._info.baseline, self._info.candidate
        pair = [] if None in (baseline, candidate) or baseline == candidate else [baseline, candidate]
        for target in dict.fromkeys([*self._here, *filter(None, (baseline, candidate))]):
            if target not in pair:
                yield from self.alone(scenario, target).verdicts
        if pair:
            for verdicts in self.both(scenario, noise):
                yield from verdicts

    def alone(self, scenario: Scenario, target: str) -> Alone:
        """One stack against the contract."""
        first: Side | None = None
        twin: ScenarioTrace | None = None
        takes: list[list[Verdict]] = []
        for side, verdicts in self.takes(scenario, target):
            takes.append(verdicts)
            if first is None:
                first = side
            elif twin is None and isinstance(side, Judged) and side.driven:
                twin = side.evidence.trace
        assert first is not None
        merged = merge(takes)
        if isinstance(first, Judged):
            first = msgspec.structs.replace(first, verdicts=merged)
        return Alone(side=first, verdicts=merged, twin=twin)

    def both(self, scenario: Scenario, noise: Sequence[NoiseFloor]) -> tuple[list[Verdict], list[Verdict]]:
        """The candidate against the baseline: the verdicts on either stack alone, and those of the comparison.

        The run must have both. Memory holds one take of each stack at a time, and the twin.
        """
        assert self._info.baseline is not None
        assert self._info.candidate is not None
        left = self.alone(scenario, self._info.baseline)
        own: list[list[Verdict]] = []
        compared: list[list[Verdict]] = []
        for right, found in self.takes(scenario, self._info.candidate):
            own.append(found)
            compared.append(compare(scenario, left.side, right, left.twin, noise))
        return [*left.verdicts, *merge(own)], merge(compared)

    def wants_twin(self, scenario: Scenario, baseline: Side) -> bool:
        """True if the candidate's first take differs from the baseline's in a way that a second take of the baseline may explain."""
        assert self._info.candidate is not None
        candidate, _ = next(self.takes(scenario, self._info.candidate))
        driven = [isinstance(side, Judged) and side.driven for side in (baseline, candidate)]
        return all(driven) and unsettled(compare(scenario, baseline, candidate, twin=None, noise=()))

    def takes(self, scenario: Scenario, target: str) -> Iterator[tuple[Side, list[Verdict]]]:
        """Each recorded take, judged. Without a recording, one side that says why."""
        recorded = self._here.get(target)
        takes = recorded.index.takes(scenario.name) if recorded is not None else []
        if recorded is None or not takes:
            yield self._not_there(scenario, target, recorded)
        for take in takes:
            assert recorded is not None
            evidence = Evidence(recorded.index.trace(scenario.name, take), recorded.book)
            verdicts = judge_evidence(scenario, evidence)
            self._look(evidence, verdicts)
            yield Judged(evidence=evidence, verdicts=verdicts, own=verdicts), verdicts

    def _not_there(self, scenario: Scenario, target: str, recorded: Recorded | None) -> tuple[Side, list[Verdict]]:
        able = self._info.declared.get(target) if recorded is None else recorded.index.header.capabilities
        said = self._info.declared.get(target, ())
        lacking = [] if able is None else missing(scenario, target, self._topology, able, said)
        if lacking:
            return Missing(target=target, topology=self._topology, reason=lacking[0].reason), lacking
        reason, blame = self._why_absent(target, recorded)
        side = Absent(target=target, topology=self._topology, reason=reason, blame=blame)
        return side, absent(scenario, target, self._topology, reason, blame)

    def _why_absent(self, target: str, recorded: Recorded | None) -> tuple[str, Blame]:
        if (error := self._info.not_started.get(f"{target}@{self._topology}")) is not None:
            return _told("did not start", error)
        if recorded is None:
            return "has no recording here", Blame.HARNESS
        last = recorded.index.last_end
        if last is not None and last.error is not None:
            return _told("was not driven after an earlier scenario ended", last.error)
        return "was not driven", Blame.HARNESS


def with_twins(found: Iterable[Recorded]) -> Iterator[tuple[ScenarioTrace, ScenarioTrace]]:
    """Each scenario of the baseline with its twin, calls only: noise does not depend on the tap's observations."""
    for recorded in found:
        for name in recorded.index.scenarios:
            if {1, 2} <= set(recorded.index.takes(name)):
                yield tuple(recorded.index.trace(name, take, observations=False) for take in (1, 2))  # type: ignore[misc]


def _told(what: str, error: CallError) -> tuple[str, Blame]:
    return f"{what}: {error.said}", Blame(error.blame) if error.blame in set(Blame) else Blame.HARNESS
