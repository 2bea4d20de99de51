"""Judge a run offline: its recordings and reference answers → conformance, comparison, ledger, gate. Drives nothing.

Recordings may be larger than memory. Judging loads one scenario at a time (its takes on both stacks), in any order of
driving.
"""

from __future__ import annotations

import datetime
import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from harness.checks import gaps
from harness.checks.base import Evidence
from harness.checks.training import GAP
from harness.contract.capability import Capability
from harness.contract.errors import Blame, UsageError
from harness.judging import census, gate, open_differences, pace
from harness.judging import ledger as known
from harness.judging.exercise import due, exercised, unexercised
from harness.judging.noise import floors, noise_floors, of_rounding
from harness.judging.recorded import Judging, Look, Recorded, with_twins
from harness.machine.targets import Step, real_stacks, released, step
from harness.records.book import Book
from harness.records.index import Index, indices
from harness.records.reference import NoiseRequest, UnansweredQuery
from harness.records.run_folder import RunFolder, references_in
from harness.records.verdict import Conformance, Drive, GapCurve, Judgement, NoiseFloor, RunInfo, Verdict
from harness.running.catalogue import declared
from harness.running.earlier import target_of, told_apart
from harness.suite import concessions, profiles
from harness.suite.plan import load_plan
from harness.suite.scenario import Scenario

__all__ = ["RunFolder", "compare_recordings", "judge_run"]

COLLECT_EVERY = 50_000
"""Objects between two garbage collections in the driver. Recordings and answers are many live objects without cycles: with
Python's own 700, collections take a third of the time on a pure Python stack, and a sixth of the time of judging."""


def judge_run(
    folder: Path, *, ledger: Path | None = None, today: datetime.date | None = None, profile: str | None = None
) -> Judgement:
    """Judge the run in `folder` with today's checks, and compare its candidate with its baseline.

    `ledger` None means the project's own, `profile` None the one that the run was asked for. Raises UsageError for a folder that
    holds no run, `RecordingError` for a recording or a book that is not whole, and `LedgerError` for a ledger that is malformed.
    """
    started = time.perf_counter()
    run = RunFolder.existing(folder)
    info = run.info()
    info = msgspec.structs.replace(info, profile=profile or info.profile)
    return _judgement(info, _with_books(run.recorded(), run.path), ledger, today, started)


def compare_recordings(
    baseline: Path,
    candidate: Path,
    *,
    ledger: Path | None = None,
    today: datetime.date | None = None,
    profile: str | None = None,
) -> Judgement:
    """Judge and compare two recordings of any origin. Each is a recording's file or a run's folder.

    From a folder with several stacks, `baseline` takes its baseline and `candidate` its candidate. Reference answers come
    from the files beside each recording; without them, checks that need the oracle are untestable.
    Raises what `judge_run` raises, and UsageError for recordings without a common topology or model.
    """
    started = time.perf_counter()
    left, right = _source(baseline, "baseline"), _source(candidate, "candidate")
    right = _told_apart(right, candidate, taken=left[0].target)
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
        profile=profile,
        checkouts={h.target: h.checkout for h in headers if h.checkout is not None},
        # What a stack offers nowhere it was not to be driven with: that is missing, and no gap of the recordings.
        declared={
            side[0].target: sorted({capability for r in side for capability in r.index.header.capabilities})
            for side in (left, right)
        },
    )
    return _judgement(info, [*left, *right], ledger, today, started)


def _source(path: Path, role: Literal["baseline", "candidate"]) -> list[Recorded]:
    if not path.is_dir():
        beside = next((p for p in (path.parent, path.parent.parent) if references_in(p)), path.parent)
        return _with_books([path], beside)
    run = RunFolder.existing(path)
    target = target_of(run, role)
    return [r for r in _with_books(run.recorded(), run.path) if r.target == target]


def _with_books(recordings: Iterable[Path], folder: Path) -> list[Recorded]:
    """Recordings, each with the answers about its model from `folder`."""
    found = indices(recordings)
    books = {sha256: Book.of(sha256, folder) for sha256 in {one.header.model_sha256 for one in found}}
    return [Recorded(index=one, book=books[one.header.model_sha256]) for one in found]


def _told_apart(found: list[Recorded], path: Path, taken: str) -> list[Recorded]:
    """The recordings; if their target's name is `taken`, it gets their run's name added."""
    names = [told_apart(r.target, r.index.header.run_id or str(path), taken) for r in found]
    return [Recorded(book=r.book, index=r.index.renamed(name)) for r, name in zip(found, names, strict=True)]


def _topologies(found: Iterable[Recorded]) -> str:
    shapes = {r.shape for r in found}
    return ", ".join(sorted(f"{shape.name}, {shape.engines} engines" for shape in shapes))


# --- judging --------------------------------------------------------------------------------------------------------


def _judgement(
    info: RunInfo, found: Sequence[Recorded], ledger: Path | None, today: datetime.date | None, started: float
) -> Judgement:
    """Everything that is judged, in the one order that works.

    1. Noise: the bounds of a comparison come from the baseline and its twin.
    2. Each scenario: every stack alone, then the pair. Outputs may only be compared where both sides keep their promises, and a
       check that reads the tap counts only where the instruments were seen to work (`Judging.scenario`, `judge_evidence`).
    3. The whole run: capabilities that nothing exercised, and the candidate's pace.
    4. The ledger, on finished verdicts: no check sees an entry, so an entry cannot hide a fact.
    5. The gate, on what the ledger leaves.
    """
    gc.set_threshold(COLLECT_EVERY)
    scenarios = declared()
    _refuse_what_differs(found)
    profile, since = _profile(info, found)
    of_release = released((r.target, part.header.packages) for r in found for part in r.index.parts)
    entries = known.load(ledger).holding_for(of_release)
    noise = noise_floors(with_twins([r for r in found if r.target == info.baseline]))
    trained: list[GapCurve] = []
    driven: dict[tuple[str, str, str], list[float]] = {}
    seen: dict[str, set[Capability]] = {r.target: set() for r in found}
    offers: dict[str, set[str]] = {r.target: set() for r in found}
    called: dict[str, set[str]] = {r.target: set() for r in found}

    def look(evidence: Evidence, verdicts: Sequence[Verdict]) -> None:
        trace = evidence.trace
        target = trace.header.target
        seen[target] |= exercised(trace)
        offers[target] |= census.callable_names(trace)
        called[target] |= census.called_names(trace)
        driven.setdefault((trace.scenario, trace.header.topology.name, target), []).append(trace.seconds)
        trained.extend(_curve(evidence, verdicts))

    verdicts = list(_of_scenarios(info, found, scenarios, noise, look))
    verdicts += _of_the_run(info, found, scenarios, seen)
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
        released=of_release,
        drives=[
            Drive(scenario=scenario, topology=topology, target=target, takes=len(takes), seconds=round(sum(takes), 3))
            for (scenario, topology, target), takes in driven.items()
        ],
        noise=[*noise, *_rounding(found), *floors(verdicts)],
        gaps=trained,
        never_called={
            target: census.never_called(offers[target], called[target]) for target in offers if info.whole_waves
        },
        open_causes=open_differences.by_cause(verdicts, open_differences.load(), of_release),
        concessions=concessions.of_stacks(concessions.load(), real_stacks((r.target for r in found), of_release)),
    )
    return msgspec.structs.replace(judgement, gate=gate.decide(judgement, load_plan(), entries, profile, since))


def _profile(info: RunInfo, found: Iterable[Recorded]) -> tuple[profiles.Profile, str]:
    """The profile of the run's step, and why it is this one."""
    if info.profile is not None:
        return profiles.named(info.profile), "named by --profile"
    packages = {r.target: r.index.header.packages for r in found}
    taken = step(info.baseline, info.candidate, packages) if info.baseline and info.candidate else Step.IMPLEMENTATION
    return profiles.default_for(taken), f"the default for {taken}"


def _rounding(found: Iterable[Recorded]) -> Iterator[NoiseFloor]:
    """One floor per model. Without a measurement there is none, and the recording's verdicts are untestable."""
    for recorded in {r.index.header.model_sha256: r for r in found}.values():
        model = recorded.index.header.model
        with suppress(UnansweredQuery):
            yield of_rounding(model["name"], model["dtype"], recorded.book.noise(NoiseRequest()))


def _refuse_what_differs(found: Sequence[Recorded]) -> None:
    """Raises UsageError unless the recordings of each topology have one shape, dtype and model. Topologies may differ."""
    for topology in dict.fromkeys(r.topology for r in found):
        shapes = {r.shape for r in found if r.topology == topology}
        if len(shapes) > 1:
            sizes = " and ".join(str(n) for n in sorted(shape.engines for shape in shapes))
            raise UsageError(
                f"the recordings of {topology} were made of different shapes ({sizes} engines): nothing can be compared",
                next_step="record both stacks in one topology with the same --engines",
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


def _of_scenarios(
    info: RunInfo, found: Sequence[Recorded], scenarios: Mapping[str, Scenario], noise: Sequence[NoiseFloor], look: Look
) -> Iterator[Verdict]:
    for topology in _topology_names(info, found):
        here = {r.target: r for r in found if r.topology == topology}
        for name in _names(info, topology, here.values(), scenarios):
            scenario = scenarios.get(name)
            if scenario is None:
                yield from (_undeclared(name, r) for r in here.values() if name in r.index.scenarios)
            else:
                yield from Judging(info, topology, here, look).scenario(scenario, noise)


def _of_the_run(
    info: RunInfo, found: Sequence[Recorded], scenarios: Mapping[str, Scenario], seen: Mapping[str, set[Capability]]
) -> Iterator[Verdict]:
    for wave in info.whole_waves[:1]:
        for target, capabilities in seen.items():
            promised = {c for r in found if r.target == target for c in r.index.header.capabilities}
            yield from unexercised(
                target, "all", wave, due(promised, scenarios.values(), info.whole_waves), capabilities
            )
    if info.whole_waves:
        yield from _paces(info, found)


def _curve(evidence: Evidence, verdicts: Sequence[Verdict]) -> Iterator[GapCurve]:
    """The gap between trainer and inference over the first take's steps, if the scenario trained."""
    trace = evidence.trace
    if trace.take == 1 and (steps := gaps.by_step(trace)):
        bound = next((v.numbers.get("bound") for v in verdicts if v.check == GAP.name), None)
        place, target = trace.header.topology.name, trace.header.target
        yield GapCurve(scenario=trace.scenario, topology=place, target=target, bound=bound, steps=steps)


def _paces(info: RunInfo, found: Sequence[Recorded]) -> Iterator[Verdict]:
    """The candidate's pace against the baseline's, in each topology with enough calls. If none has, the first one's verdict."""
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
    """The timings of one take of each scenario. Loads calls only."""
    driven = [name for name in recorded.scenarios if take in recorded.takes(name)]
    return pace.timings(recorded.trace(name, take, observations=False) for name in driven)


def _topology_names(info: RunInfo, found: Sequence[Recorded]) -> list[str]:
    not_started = (name.rpartition("@")[2] for name in info.not_started)
    return list(dict.fromkeys([*(r.topology for r in found), *not_started]))


def _names(info: RunInfo, topology: str, here: Iterable[Recorded], scenarios: Mapping[str, Scenario]) -> Iterator[str]:
    """The scenarios that any stack drove in this topology, and those that should have been driven."""
    driven = (name for r in here for name in r.index.scenarios)
    due = (s.name for s in scenarios.values() if s.wave in info.whole_waves and s.by_default(topology))
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
