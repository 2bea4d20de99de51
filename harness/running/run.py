"""Judge a run offline: its recordings and reference answers → conformance, comparison, ledger, gate. Drives nothing.

Recordings may be larger than memory: one scenario is loaded at a time (its takes on both stacks), whatever the order in
which each stack was driven.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

import msgspec

from harness.checks import gaps
from harness.checks.base import Evidence
from harness.checks.training import GAP
from harness.contract.capability import Capability
from harness.contract.errors import Blame, UsageError
from harness.contract.topology import Topology
from harness.judging import gate, pace
from harness.judging import ledger as known
from harness.judging.exercise import due, exercised, unexercised
from harness.judging.judge import absent, judge_evidence, missing
from harness.judging.noise import floors, noise_floors, of_rounding
from harness.judging.parity import Absent, Judged, Missing, Side, compare
from harness.judging.takes import merge
from harness.records.book import Book
from harness.records.index import Index, indices
from harness.records.recording import CallError, ScenarioTrace
from harness.records.reference import NoiseRequest, UnansweredQuery
from harness.records.run_folder import RunFolder, references_in
from harness.records.verdict import Conformance, GapCurve, Judgement, NoiseFloor, RunInfo, Verdict
from harness.running.catalogue import declared
from harness.suite.plan import load_plan
from harness.suite.scenario import Scenario

__all__ = ["RunFolder", "compare_recordings", "judge_run"]


@final
class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The recordings of one seat with the oracle's answers that belong to them."""

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
        """The topology, but for the words that describe it."""
        return msgspec.structs.replace(self.index.header.topology, about="")


def judge_run(folder: Path, *, ledger: Path | None = None, today: datetime.date | None = None) -> Judgement:
    """Judge the run in `folder` with today's checks, and compare its candidate with its baseline.

    `ledger` None means the project's own. Raises UsageError for a folder that holds no run, `RecordingError` for a
    recording or a book that is not whole, and `LedgerError` for a ledger that is malformed.
    """
    started = time.perf_counter()
    run = RunFolder.existing(folder)
    return _judgement(run.info(), _with_books(run.recorded(), run.path), ledger, today, started)


def compare_recordings(
    baseline: Path, candidate: Path, *, ledger: Path | None = None, today: datetime.date | None = None
) -> Judgement:
    """Judge and compare two recordings, made whenever and wherever; each is a recording's file or a run's folder.

    Of a folder with several stacks, the baseline's side gives its baseline and the candidate's its candidate. Reference
    answers are those beside each recording; without them, what needs the oracle is untestable.
    Raises what `judge_run` raises, and UsageError for recordings without a common topology or model.
    """
    started = time.perf_counter()
    left, right = _source(baseline, "baseline"), _source(candidate, "candidate")
    left, right = _told_apart(left, baseline), _told_apart(right, candidate, taken=left[0].target)
    if not {r.shape for r in left} & {r.shape for r in right}:
        raise UsageError(
            f"{baseline} ({_topologies(left)}) and {candidate} ({_topologies(right)}) have no topology in common",
            next_step="compare recordings of one topology",
        )
    headers = [r.index.header for r in (*left, *right)]
    info = RunInfo(
        run_id=f"{headers[0].run_id}~{headers[-1].run_id}",
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=f"parity compare {baseline} {candidate}",
        baseline=left[0].target,
        candidate=right[0].target,
        start="ray" if all(h.start == "ray" for h in headers) else "fork",
        engine="/".join(sorted({h.engine for h in headers})),
    )
    return _judgement(info, [*left, *right], ledger, today, started)


def _source(path: Path, role: str) -> list[Recorded]:
    if not path.is_dir():
        beside = next((p for p in (path.parent, path.parent.parent) if references_in(p)), path.parent)
        return _with_books([path], beside)
    run = RunFolder.existing(path)
    wanted = run.info().baseline if role == "baseline" else run.info().candidate
    found = _with_books(run.recorded(), run.path)
    targets = sorted({r.target for r in found})
    chosen = wanted if wanted in targets else (targets[0] if len(targets) == 1 else None)
    if chosen is None:
        raise UsageError(
            f"{path} holds recordings of {', '.join(targets) or 'nothing'}, and none is its {role}",
            next_step="name the recording's file",
        )
    return [r for r in found if r.target == chosen]


def _with_books(recordings: Iterable[Path], folder: Path) -> list[Recorded]:
    """Recordings, each with the answers about its model that lie in `folder`."""
    found = indices(recordings)
    books = {sha256: Book.of(sha256, folder) for sha256 in {one.header.model_sha256 for one in found}}
    return [Recorded(index=one, book=books[one.header.model_sha256]) for one in found]


def _told_apart(found: list[Recorded], path: Path, taken: str | None = None) -> list[Recorded]:
    """Two recordings of one target are told apart by the name of their run."""
    if found[0].target != taken:
        return found
    return [
        Recorded(book=r.book, index=r.index.renamed(f"{r.target} in {r.index.header.run_id or path}")) for r in found
    ]


def _topologies(found: Iterable[Recorded]) -> str:
    shapes = {r.shape for r in found}
    return ", ".join(sorted(f"{shape.name}, {shape.engines} engines" for shape in shapes))


# --- judging --------------------------------------------------------------------------------------------------------


def _judgement(
    info: RunInfo,
    found: Sequence[Recorded],
    ledger: Path | None,
    today: datetime.date | None,
    started: float,
) -> Judgement:
    scenarios = declared()
    _refuse_what_differs(found)
    entries = known.load(ledger)
    noise = noise_floors(_with_twins([r for r in found if r.target == info.baseline]))
    trained: list[GapCurve] = []
    verdicts = list(_verdicts(info, found, scenarios, noise, trained))
    judged = {(v.scenario, v.topology) for v in verdicts}
    elsewhere = [s.name for s in scenarios.values() if any((s.name, t) not in judged for t in s.topologies)]
    day = today or datetime.datetime.now(datetime.UTC).date()
    verdicts, problems = known.apply(entries, verdicts, day, elsewhere)
    judgement = Judgement(
        run=msgspec.structs.replace(
            info,
            headers=[msgspec.to_builtins(part.header) for r in found for part in r.index.parts],
            seconds=info.seconds | {"judge": time.perf_counter() - started},
        ),
        verdicts=verdicts,
        ledger_problems=problems,
        noise=[*noise, *_rounding(found), *floors(verdicts)],
        gaps=trained,
    )
    return msgspec.structs.replace(judgement, gate=gate.decide(judgement, load_plan(), entries))


def _rounding(found: Iterable[Recorded]) -> Iterator[NoiseFloor]:
    """One line for each model. A recording for which it was not measured has untestable verdicts, which say so."""
    for recorded in {r.index.header.model_sha256: r for r in found}.values():
        model = recorded.index.header.model
        with suppress(UnansweredQuery):
            yield of_rounding(model["name"], model["dtype"], recorded.book.noise(NoiseRequest()))


def _refuse_what_differs(found: Sequence[Recorded]) -> None:
    """Topologies may have models of their own; within one all recordings must have the same, and the same shape."""
    for topology in dict.fromkeys(r.topology for r in found):
        shapes = {r.shape for r in found if r.topology == topology}
        if len(shapes) > 1:
            sizes = " and ".join(str(n) for n in sorted(shape.engines for shape in shapes))
            raise UsageError(
                f"the recordings of {topology} were made of different shapes ({sizes} engines): nothing can be compared",
                next_step="record both stacks in one topology with as many --engines",
            )
        dtypes = {r.index.header.model["dtype"] for r in found if r.topology == topology}
        if len(dtypes) > 1:
            raise UsageError(
                f"the engines of {topology} computed in {' and '.join(sorted(dtypes))}: nothing can be compared",
                next_step="record both stacks with one --dtype",
            )
        models = {r.index.header.model_sha256 for r in found if r.topology == topology}
        if len(models) > 1:
            raise UsageError(
                f"the recordings of {topology} were made with {len(models)} different models: nothing can be compared",
                next_step="record both stacks with one checkpoint",
            )


def _with_twins(found: Iterable[Recorded]) -> Iterator[tuple[ScenarioTrace, ScenarioTrace]]:
    """Each scenario of the baseline with its twin, calls only: the tap's observations have no part in noise."""
    for recorded in found:
        for name in recorded.index.scenarios:
            if {1, 2} <= set(recorded.index.takes(name)):
                yield tuple(recorded.index.trace(name, take, observations=False) for take in (1, 2))  # type: ignore[misc]


def _verdicts(
    info: RunInfo,
    found: Sequence[Recorded],
    scenarios: Mapping[str, Scenario],
    noise: Sequence[NoiseFloor],
    trained: list[GapCurve],
) -> Iterator[Verdict]:
    """`trained` is filled with the curves of what was trained."""
    seen: dict[str, set[Capability]] = {r.target: set() for r in found}
    for topology in _topology_names(info, found):
        here = {r.target: r for r in found if r.topology == topology}
        for name in _names(info, topology, here.values(), scenarios):
            scenario = scenarios.get(name)
            if scenario is None:
                yield from (_undeclared(name, r) for r in here.values() if name in r.index.scenarios)
            else:
                yield from _Judging(info, topology, here, seen, trained).scenario(scenario, noise)
    for wave in info.whole_waves[:1]:
        for target, capabilities in seen.items():
            promised = {c for r in found if r.target == target for c in r.index.header.capabilities}
            yield from unexercised(
                target, "all", wave, due(promised, scenarios.values(), info.whole_waves), capabilities
            )
    if info.whole_waves:
        yield from _paces(info, found)


def _paces(info: RunInfo, found: Sequence[Recorded]) -> Iterator[Verdict]:
    """The candidate's pace beside the baseline's, in each topology in which enough was driven; without any, the first says so."""
    told: list[tuple[bool, Verdict]] = []
    for topology in _topology_names(info, found) if info.baseline != info.candidate else ():
        here = {r.target: r.index for r in found if r.topology == topology}
        baseline, candidate = here.get(info.baseline or ""), here.get(info.candidate or "")
        if baseline is None or candidate is None:
            continue
        usual = _timings(baseline, take=1)
        measured = pace.between(usual, _timings(candidate, take=1))
        verdict = pace.verdict(
            measured,
            pace.between(usual, _timings(baseline, take=2)),
            baseline=baseline.header.target,
            candidate=candidate.header.target,
            topology=topology,
            wave=info.whole_waves[0],
        )
        told.append((measured.enough, verdict))
    yield from [verdict for enough, verdict in told if enough] or [verdict for _, verdict in told[:1]]


def _timings(recorded: Index, *, take: int) -> pace.Timings:
    """Of one take of each scenario, calls only."""
    driven = [name for name in recorded.scenarios if take in recorded.takes(name)]
    return pace.timings(recorded.trace(name, take, observations=False) for name in driven)


def _topology_names(info: RunInfo, found: Sequence[Recorded]) -> list[str]:
    not_started = (name.rpartition("@")[2] for name in info.not_started)
    return list(dict.fromkeys([*(r.topology for r in found), *not_started]))


def _names(info: RunInfo, topology: str, here: Iterable[Recorded], scenarios: Mapping[str, Scenario]) -> Iterator[str]:
    """Scenarios that were driven here on any stack, and those that should have been."""
    driven = (name for r in here for name in r.index.scenarios)
    due = (s.name for s in scenarios.values() if s.wave in info.whole_waves and topology in s.topologies)
    yield from dict.fromkeys([*driven, *due])


def _undeclared(name: str, recorded: Recorded) -> Verdict:
    return Verdict(
        scenario=name,
        wave=0,
        task=0,
        promise="every recorded scenario is declared",
        topology=recorded.topology,
        check="scenario.declared",
        target=recorded.target,
        status=Conformance.UNTESTABLE,
        blame=Blame.HARNESS,
        reason="it was recorded, and no scenario of that name is declared now",
        next_step="judge with the scenarios that it was recorded with",
    )


class _Judging:
    """One scenario in one topology: each stack against the contract, then the candidate against the baseline."""

    def __init__(
        self,
        info: RunInfo,
        topology: str,
        here: Mapping[str, Recorded],
        seen: dict[str, set[Capability]],
        trained: list[GapCurve],
    ) -> None:
        self.info, self.topology, self.here, self.seen, self.trained = info, topology, here, seen, trained

    def scenario(self, scenario: Scenario, noise: Sequence[NoiseFloor]) -> Iterator[Verdict]:
        baseline, candidate = self.info.baseline, self.info.candidate
        for target in self.here:
            if target not in (baseline, candidate):
                yield from self._alone(scenario, target)[1]
        if baseline is None or candidate is None or baseline == candidate:
            for target in dict.fromkeys(t for t in (baseline, candidate) if t is not None):
                yield from self._alone(scenario, target)[1]
            return
        left, verdicts, twin = self._alone(scenario, baseline)
        yield from verdicts
        own: list[list[Verdict]] = []
        compared: list[list[Verdict]] = []
        for right, found in self._takes(scenario, candidate):
            own.append(found)
            compared.append(compare(scenario, left, right, twin, noise))
        yield from merge(own)
        yield from merge(compared)

    def _alone(self, scenario: Scenario, target: str) -> tuple[Side, list[Verdict], ScenarioTrace | None]:
        """All takes as one side: the first take's evidence, everyone's verdicts, and the second take as the twin."""
        first: Side | None = None
        twin: ScenarioTrace | None = None
        takes: list[list[Verdict]] = []
        for side, verdicts in self._takes(scenario, target):
            takes.append(verdicts)
            if first is None:
                first = side
            elif twin is None and isinstance(side, Judged) and side.driven:
                twin = side.evidence.trace
        assert first is not None
        merged = merge(takes)
        if isinstance(first, Judged):
            first = msgspec.structs.replace(first, verdicts=merged)
        return first, merged, twin

    def _takes(self, scenario: Scenario, target: str) -> Iterator[tuple[Side, list[Verdict]]]:
        """Each recorded take, judged; at least one side, which says why where nothing was recorded."""
        recorded = self.here.get(target)
        takes = recorded.index.takes(scenario.name) if recorded is not None else []
        if recorded is None or not takes:
            yield self._not_there(scenario, target, recorded)
        for take in takes:
            assert recorded is not None
            evidence = Evidence(recorded.index.trace(scenario.name, take), recorded.book)
            self.seen[target] |= exercised(evidence.trace)
            verdicts = judge_evidence(scenario, evidence)
            if take == takes[0] and (steps := gaps.by_step(evidence.trace)):
                bound = next((v.numbers.get("bound") for v in verdicts if v.check == GAP.name), None)
                curve = GapCurve(
                    scenario=scenario.name, topology=self.topology, target=target, bound=bound, steps=steps
                )
                self.trained.append(curve)
            yield Judged(evidence=evidence, verdicts=verdicts), verdicts

    def _not_there(self, scenario: Scenario, target: str, recorded: Recorded | None) -> tuple[Side, list[Verdict]]:
        able = self.info.declared.get(target) if recorded is None else recorded.index.header.capabilities
        said = self.info.declared.get(target, ())
        lacking = [] if able is None else missing(scenario, target, self.topology, able, said)
        if lacking:
            return Missing(target=target, topology=self.topology, reason=lacking[0].reason), lacking
        reason, blame = self._why_absent(target, recorded)
        side = Absent(target=target, topology=self.topology, reason=reason, blame=blame)
        return side, absent(scenario, target, self.topology, reason, blame)

    def _why_absent(self, target: str, recorded: Recorded | None) -> tuple[str, Blame]:
        if (error := self.info.not_started.get(f"{target}@{self.topology}")) is not None:
            return _told("did not start", error)
        if recorded is None:
            return "has no recording here", Blame.HARNESS
        last = recorded.index.last_end
        if last is not None and last.error is not None:
            return _told("was not driven after an earlier scenario ended", last.error)
        return "was not driven", Blame.HARNESS


def _told(what: str, error: CallError) -> tuple[str, Blame]:
    return f"{what}: {error.kind}", Blame(error.blame) if error.blame in set(Blame) else Blame.HARNESS
