"""The track record: faults that releases really had, judged again by today's judge, from small recordings. Drives nothing.

``scenarios/track_record.toml`` says what users met, which release has the fault, which does not, and which check tells them apart.
``reports/evidence/track/<id>/{with,without}`` hold the scenario as each release ran it, with the reference's answers.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, final

import msgspec

from harness import PROJECT
from harness.contract import data
from harness.contract.errors import UsageError
from harness.judging import ledger
from harness.judging.judge import judge, queries
from harness.judging.sources import SOURCE
from harness.records import excerpt
from harness.records.book import Book
from harness.records.index import Index, index, indices
from harness.records.run_folder import RunFolder
from harness.records.verdict import Conformance, Verdict
from harness.running.catalogue import declared

RECORDS = PROJECT / "reports" / "evidence" / "track"
RECORDING, REFERENCE = "recording.jsonl", "reference.jsonl"
LARGEST = 400_000
"""Bytes of one recording. A repository bears some dozens of that size."""
Side = Literal["with", "without"]
SIDES: tuple[Side, Side] = ("with", "without")


@final
class ReleasedFault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"having": "with", "free": "without"}
):
    """One row of the track record. The file's head explains the fields."""

    id: str
    met: str
    having: str
    free: str
    scenario: str
    check: str
    topology: str = "disaggregated"
    entry: str | None = None
    reason: str = ""
    source: str = ""

    @property
    def told(self) -> str:
        """The fault in a line: id, releases, and what tells them apart."""
        return f"{self.id}: {self.check} of {self.scenario} is red on {self.having}, green on {self.free}"

    def target(self, side: Side) -> str:
        return self.having if side == "with" else self.free

    def shows(self, side: Side, verdict: Verdict) -> bool:
        """True if the verdict is the one that this release has to get: red for the fault's reason, or green."""
        if side == "without":
            return verdict.status == Conformance.PASS
        return verdict.status == Conformance.FAIL and any(
            re.fullmatch(self.reason, reason, re.DOTALL) for reason in verdict.each_reason
        )


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fault: list[ReleasedFault]


def load(path: Path | None = None) -> list[ReleasedFault]:
    """All rows of a file; None means the one shipped with the scenarios. An `entry` gives its reason and source to the row.

    Raises UsageError for a malformed file or row, and for an entry that the ledger lacks or that is about something else.
    """
    known = ledger.load()
    found = [_with_entry(fault, known) for fault in data.read(path, "track_record.toml", _File, holds="faults").fault]
    for number, fault in enumerate(found):
        if wrong := _wrong(fault, [one.id for one in found[:number]]):
            raise UsageError(
                f"{path or 'track_record.toml'}: fault {fault.id!r}: {wrong}", next_step="the file's head explains it"
            )
    return found


def chosen(ids: Sequence[str]) -> list[ReleasedFault]:
    """The shipped rows with these ids, or all for none. Raises UsageError for an unknown id, and what `load` raises."""
    rows = {fault.id: fault for fault in load()}
    if unknown := [one for one in ids if one not in rows]:
        raise UsageError(f"the track record has no {', '.join(unknown)}", next_step=f"it has {', '.join(rows)}")
    return [rows[one] for one in dict.fromkeys(ids)] or list(rows.values())


def _with_entry(fault: ReleasedFault, known: ledger.Ledger) -> ReleasedFault:
    if fault.entry is None:
        return fault
    entry = known.get(fault.entry)
    about = next(
        (
            one
            for one in (entry.each if entry is not None else ())
            if one.at(fault.scenario, fault.topology, fault.having) and fnmatchcase(fault.check, one.check)
        ),
        None,
    )
    if about is None:
        lacks = "has no such entry" if entry is None else "has it for another scenario, check, topology or release"
        raise UsageError(
            f"fault {fault.id!r} names the entry {fault.entry!r}: the ledger {lacks}",
            next_step="write the reason and the source into the row, in place of the entry",
        )
    if fault.reason or fault.source:
        raise UsageError(
            f"fault {fault.id!r} names an entry and gives a reason or source of its own", next_step="leave out one"
        )
    return msgspec.structs.replace(fault, reason=about.reason, source=about.source)


def _wrong(fault: ReleasedFault, before: Sequence[str]) -> str | None:
    """What is wrong with a well-typed row."""
    try:
        pattern = re.compile(fault.reason)
    except re.error as e:
        return f"its reason is not a regular expression: {e}"
    if pattern.fullmatch("") or pattern.fullmatch(ledger.UNLIKELY):
        return f"its reason {fault.reason!r} matches any reason"
    wrong = {
        "its id is no name of lower case letters, digits, dots and dashes": not ledger.IDENTITY.fullmatch(fault.id),
        "its id is given twice": fault.id in before,
        "it does not say what users met": not fault.met.strip(),
        "the same release has it and has it not": fault.having == fault.free,
        'its source is not "file.py:123: what the released code does there"': not SOURCE.fullmatch(fault.source),
    }
    return next((told for told, holds in wrong.items() if holds), None)


# --- replaying


def recorded(fault: ReleasedFault, records: Path = RECORDS) -> bool:
    """True if both releases' recordings are there."""
    return all((records / fault.id / side / RECORDING).is_file() for side in SIDES)


@final
class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What today's judge says about a fault."""

    fault: ReleasedFault
    problem: str | None
    """Why the judge does not tell the two releases apart; None if it does."""


def replay(fault: ReleasedFault, records: Path = RECORDS) -> Replayed:
    """Judge both recordings of a fault. Raises `RecordingError` for one that is not whole."""
    problems = [_problem(fault, side, records / fault.id / side) for side in SIDES]
    return Replayed(fault=fault, problem=next(filter(None, problems), None))


def _problem(fault: ReleasedFault, side: Side, folder: Path) -> str | None:
    recording = folder / RECORDING
    if not recording.is_file():
        return f"there is no recording of {fault.target(side)}: parity track {fault.id} --add RUN"
    found = index(recording)
    recorded = (found.header.target, found.header.topology.name, found.scenarios)
    if recorded != (fault.target(side), fault.topology, [fault.scenario]):
        return f"{recording} is not {fault.scenario} on {fault.target(side)}@{fault.topology}"
    verdict = _verdict(fault, found, Book.load(folder / REFERENCE))
    if isinstance(verdict, str):
        return verdict
    if fault.shows(side, verdict):
        return None
    told = f"{verdict.status}{verdict.reason and f': {verdict.reason}'}"
    return (
        f"{fault.target(side)} has the fault, and today's judge says {told}"
        if side == "with"
        else f"{fault.target(side)} does not have the fault, and today's judge says {told}"
    )


def _verdict(fault: ReleasedFault, recorded: Index, book: Book) -> Verdict | str:
    """The check's verdict on the first take, or why there is none."""
    scenario = declared().get(fault.scenario)
    if scenario is None:
        return f"today's suite has no scenario {fault.scenario}"
    verdicts = judge(scenario, recorded.trace(fault.scenario), book)
    found = next((one for one in verdicts if one.check == fault.check), None)
    return found or f"today's suite does not judge {fault.scenario} by {fault.check}"


# --- adding


class Runs:
    """Runs from which recordings are taken, each read once."""

    def __init__(self, runs: Iterable[Path]) -> None:
        """Raises UsageError for a folder without a run, `RecordingError` for a recording that is not whole."""
        self._seats = [(run, seat) for run in runs for seat in indices(RunFolder.existing(run).recorded())]

    def add(self, fault: ReleasedFault, records: Path = RECORDS) -> None:
        """Put both recordings of a fault into `records`, in place of earlier ones.

        For each release the first run counts that shows it as the row says. Raises UsageError if there is none: nothing is kept.
        """
        if fault.scenario not in declared():
            raise UsageError(f"today's suite has no scenario {fault.scenario}", next_step="name one of today's")
        records.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=records) as staging:
            for side in SIDES:
                self._cut(fault, side, Path(staging))
            if (records / fault.id).exists():
                shutil.rmtree(records / fault.id)
            (Path(staging) / fault.id).rename(records / fault.id)

    def _cut(self, fault: ReleasedFault, side: Side, records: Path) -> None:
        target, folder = fault.target(side), records / fault.id / side
        said: list[str] = []
        for run, seat in self._seats:
            here = (seat.header.target, seat.header.topology.name) == (target, fault.topology)
            if not here or 1 not in seat.takes(fault.scenario):
                continue
            _publish(fault, run, seat, folder)
            size = (folder / RECORDING).stat().st_size
            problem = f"its recording has {size} bytes, more than {LARGEST}" if size > LARGEST else None
            problem = problem or _problem(fault, side, folder)
            if problem is None:
                return
            said.append(f"{run}: {problem}")
            shutil.rmtree(folder)
        raise UsageError(
            f"no run shows {fault.id} on {target}@{fault.topology}: "
            + ("; ".join(said) or f"none recorded {fault.scenario} there"),
            next_step=f"drive it: parity run --stack {target} --topology {fault.topology} -k {fault.scenario.rpartition('.')[2]}",
        )


def _publish(fault: ReleasedFault, run: Path, seat: Index, folder: Path) -> None:
    """One release's recording with the answers that its checks ask for."""
    folder.mkdir(parents=True)
    part = seat.parts[seat.spans[fault.scenario, 1].part]
    recording = folder / RECORDING
    excerpt.publish(part.path, recording, fault.scenario)
    answers = Book.of(part.header.model_sha256, run)
    scenario, trace = declared()[fault.scenario], index(recording).trace(fault.scenario)
    with Book.create(folder / REFERENCE, part.header.model_sha256) as book:
        while book.take_over(book.missing(queries(scenario, trace, book)), answers):
            pass  # an answer may lead to another question
