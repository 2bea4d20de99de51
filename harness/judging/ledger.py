"""The ledger of known divergences: executed, reason-matched, capped, owned, expiring. Stale entries are red.

Read from ``scenarios/known_divergences.toml``. `apply` and `uses` are pure. `apply` returns one run's verdicts with `known` set, and
the problems of the entries that this run shows. `uses` adds up what each entry explained in several runs.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.resources import as_file, files
from itertools import product
from pathlib import Path
from typing import Any, Literal, final

import msgspec

from harness.contract.errors import LedgerError
from harness.judging.sources import PLACE, SOURCE, moved
from harness.records.verdict import Conformance, LedgerProblem, Parity, Verdict

IDENTITY = re.compile(r"[a-z0-9][a-z0-9.-]*")
Claims = dict[tuple[str, str], list[str]]
"""An entry's id and target → the verdicts that it explains, also those beyond its cap."""
UNLIKELY = "\x00a reason that no check gives\x00"


@final
class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known divergence. The fields are explained in the file's head."""

    id: str
    scenario: str
    check: str
    targets: list[str]
    reason: str
    cap: int
    owner: str
    expires: datetime.date
    source: str
    topology: str = "*"
    status: Literal["fail", "regression", "both-wrong", "missing", "untestable"] | None = None
    also: dict[str, str] = {}
    """Other stacks or pairs that have the difference, and where the cause stands in their release."""
    link: str | None = None
    blocks: bool = True
    race: str | None = None

    @property
    def stacks(self) -> list[str]:
        """All stacks and pairs that have the difference."""
        return [*self.targets, *self.also]

    @property
    def sources(self) -> str:
        """The source, and the cause's place in each other release."""
        return "; ".join([self.source, *(f"{stack}: {place}" for stack, place in self.also.items())])

    @property
    def each(self) -> list[Entry]:
        """The entry for each stack or pair. Each copy has the whole cap, and becomes stale alone."""
        own = [msgspec.structs.replace(self, targets=[stack], also={}) for stack in self.targets]
        return own + [
            msgspec.structs.replace(self, targets=[stack], also={}, source=moved(self.source, place))
            for stack, place in self.also.items()
        ]

    def about(self, verdict: Verdict) -> bool:
        """True if the verdict has the entry's scenario, check, stack or pair, and topology, whatever it says."""
        return fnmatchcase(verdict.check, self.check) and any(
            self.at(verdict.scenario, verdict.topology, stack) for stack in _stacks(verdict)
        )

    def at(self, scenario: str, topology: str, stack: str) -> bool:
        """True if the entry has this scenario, topology, and stack or pair."""
        return stack in self.stacks and fnmatchcase(scenario, self.scenario) and fnmatchcase(topology, self.topology)

    def settled_by(self, verdict: Verdict) -> bool:
        """True if the verdict is about the entry and shows whether its difference is still there."""
        if not self.about(verdict) or self.status == "untestable":
            return self.about(verdict)
        return verdict.status != Conformance.UNTESTABLE and (
            verdict.red or verdict.known is not None or verdict.status != Conformance.MISSING
        )

    def may_be_about(self, scenarios: Iterable[str]) -> bool:
        """True if the scenario or the topology is a pattern and the scenario covers one of these."""
        pattern = any(c in self.scenario + self.topology for c in "*?[")
        return pattern and any(fnmatchcase(name, self.scenario) for name in scenarios)

    def explains(self, verdict: Verdict, reason: str) -> bool:
        """True if the entry describes the verdict and the whole of this reason of it."""
        return (
            self.about(verdict)
            and (self.status is None or verdict.status == self.status)
            and re.fullmatch(self.reason, reason, re.DOTALL) is not None
        )


@final
class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """All entries, in the order of the file."""

    entries: tuple[Entry, ...] = ()
    borrowed: tuple[Entry, ...] = ()
    """Copies for targets that are a release under another name (`holding_for`). They explain, and are never stale."""

    def get(self, entry_id: str | None) -> Entry | None:
        return next((entry for entry in self.entries if entry.id == entry_id), None)

    def holding_for(self, released: Mapping[str, str | None]) -> Ledger:
        """The ledger whose entries also hold for these: target → the released target that it is (None: no entry holds).

        Each stack or pair gets a copy of the entry. A pair may have one side under its own name.
        """
        names: dict[str, list[str]] = {}
        for target, release in released.items():
            if release is not None:
                names.setdefault(release, []).append(target)
        borrowed = (
            msgspec.structs.replace(one, targets=[other])
            for entry in self.entries
            for one in entry.each
            for sides in product(*([side, *names.get(side, ())] for side in one.targets[0].split("~")))
            if (other := "~".join(sides)) != one.targets[0]
        )
        return msgspec.structs.replace(self, borrowed=tuple(borrowed))


def load(path: Path | None = None) -> Ledger:
    """Read a ledger; None means the one shipped with the scenarios.

    Raises `LedgerError` with the entry's id and the field for anything malformed, unknown or given twice.
    """
    if path is None:
        with as_file(files("scenarios") / "known_divergences.toml") as shipped:
            return load(shipped)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise LedgerError(f"cannot read the ledger {path}: {e.strerror}", next_step="name a ledger file") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise LedgerError(f"{path} is not TOML: {e}", next_step="correct that line") from e
    tables = content.pop("divergence", [])
    if content or not isinstance(tables, list):
        raise LedgerError(
            f"{path}: unknown {', '.join(map(repr, content)) or 'shape'}",
            next_step="a ledger is a list of [[divergence]] tables",
        )
    entries = tuple(_entry(table, number, path) for number, table in enumerate(tables, start=1))
    _refuse_duplicates(entries, path)
    return Ledger(entries=entries)


def _entry(table: Any, number: int, path: Path) -> Entry:
    name = table.get("id") if isinstance(table, dict) else None
    where = f"{path}: entry {name!r}" if name else f"{path}: entry number {number}"
    try:
        entry = msgspec.convert(table, Entry)
    except msgspec.ValidationError as e:
        raise LedgerError(
            f"{where}: {e}", next_step="the head of scenarios/known_divergences.toml explains each field"
        ) from e
    for field, wrong, next_step in _faults(entry):
        raise LedgerError(f"{where}: field {field!r} {wrong}", next_step=next_step)
    return entry


def _faults(entry: Entry) -> Iterable[tuple[str, str, str]]:
    """What is wrong with a well-typed entry: (field, problem, next step)."""
    if not IDENTITY.fullmatch(entry.id):
        yield "id", f"is {entry.id!r}", "use lower case letters, digits, dots and dashes"
    for field in ("scenario", "check", "owner", "topology", "race"):
        said = getattr(entry, field)
        if said is not None and not said.strip():
            yield field, "is empty", "say it, or leave it out if it is optional"
    if entry.cap < 1:
        yield "cap", f"is {entry.cap}", "say how many verdicts the entry may explain, at least 1"
    yield from _wrong_stacks(entry)
    try:
        pattern = re.compile(entry.reason, re.DOTALL)
    except re.error as e:
        yield "reason", f"is not a regular expression: {e}", "correct it; write literal text with re.escape"
    else:
        if pattern.fullmatch("") or pattern.fullmatch(UNLIKELY):
            yield "reason", f"{entry.reason!r} matches any reason", "write what the verdict says"
    if not SOURCE.fullmatch(entry.source):
        yield "source", f"is {entry.source!r}", 'write "file.py:123: what the released code does there"'
    if entry.link is not None and not entry.link.startswith(("https://", "http://")):
        yield "link", f"is {entry.link!r}", "give an https:// address"


def _wrong_stacks(entry: Entry) -> Iterable[tuple[str, str, str]]:
    if not entry.targets or len(set(entry.stacks)) != len(entry.stacks):
        yield "targets", f"is {entry.stacks}", 'name each stack, or pair "baseline~candidate", once'
    for target in entry.stacks:
        if not target.strip("~ ") or target.count("~") > 1 or "*" in target:
            yield "targets", f"holds {target!r}", 'write "skyrl-0.2.0:http" or "skyrl-0.2.0:legacy~skyrl-0.2.0:http"'
    for target, place in entry.also.items():
        if not PLACE.fullmatch(place):
            yield "also", f"says {place!r} of {target}", 'write "file.py:123", where the cause stands in that release'


def _refuse_duplicates(entries: Sequence[Entry], path: Path) -> None:
    by_id = Counter(entry.id for entry in entries)
    for name, times in by_id.items():
        if times > 1:
            raise LedgerError(
                f"{path}: entry {name!r}: field 'id' is given {times} times", next_step="give each entry its own id"
            )
    seen: dict[tuple[Any, ...], Entry] = {}
    for entry in entries:
        for target in entry.stacks:
            match = (entry.scenario, entry.check, entry.topology, entry.status, entry.reason, target)
            if match in seen:
                raise LedgerError(
                    f"{path}: entry {entry.id!r}: field 'targets' matches what {seen[match].id!r} matches",
                    next_step="write one entry per difference",
                )
            seen[match] = entry


def apply(
    ledger: Ledger, verdicts: Sequence[Verdict], today: datetime.date, elsewhere: Sequence[str] = ()
) -> tuple[list[Verdict], list[LedgerProblem]]:
    """Set `known` on the red verdicts that the ledger explains, and return the problems of its entries.

    Verdicts keep their order. Within an entry's cap the first verdicts by `Verdict.id` are explained, so the same run
    gives the same answer. Entries without a judged verdict in this run are left alone. `elsewhere` names scenarios that
    were not driven in each of their topologies; an entry whose pattern covers one of them is called neither stale nor changed.
    """
    own = [one for entry in ledger.entries for one in entry.each if entry.expires >= today]
    live = [*own, *(entry for entry in ledger.borrowed if entry.expires >= today)]
    known: dict[str, str] = {}
    claims: Claims = {(entry.id, entry.targets[0]): [] for entry in live}
    problems = [
        LedgerProblem(
            entry=entry.id,
            problem=f"expired on {entry.expires}: it explains nothing any more",
            next_step=f"{entry.owner}: fix the difference, or review it and renew the entry",
        )
        for entry in ledger.entries
        if entry.expires < today
    ]
    explained: dict[str, dict[str, str]] = {}
    for verdict in sorted((v for v in verdicts if v.baseline is None and v.red), key=lambda v: v.id):
        explained[verdict.id] = _claim(verdict, live, claims, problems)
        known |= _known(verdict, explained[verdict.id])
    stacks = {(v.scenario, v.topology, v.check, v.target): v for v in verdicts if v.baseline is None}
    for verdict in sorted((v for v in verdicts if v.baseline is not None), key=lambda v: v.id):
        covered = _covered_by(verdict, stacks, known)
        if covered is not None:
            known[verdict.id] = covered
        elif verdict.red:
            explained[verdict.id] = _claim(verdict, live, claims, problems)
            known |= _known(verdict, explained[verdict.id])
    by_stack: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        for stack in _stacks(verdict):
            by_stack.setdefault(stack, []).append(verdict)
    for number, entry in enumerate(live):
        claimed = claims[entry.id, entry.targets[0]]
        problems.extend(_over_cap(entry, claimed))
        if not claimed and number < len(own) and not entry.race and not entry.may_be_about(elsewhere):
            problems.extend(_stale(entry, by_stack.get(entry.targets[0], ()), known))
    told = [msgspec.structs.replace(v, known=known.get(v.id), explained=explained.get(v.id, {})) for v in verdicts]
    return told, list(dict.fromkeys(problems))


def _stacks(verdict: Verdict) -> list[str]:
    """The stack that a verdict is about, and the pair if it compares."""
    return [verdict.target] + [f"{verdict.baseline}~{verdict.target}"] * bool(verdict.baseline)


def _known(verdict: Verdict, explained: dict[str, str]) -> dict[str, str]:
    """The verdict's id and the first entry, if each of its reasons is explained."""
    entries = [explained.get(reason) for reason in verdict.each_reason]
    return {verdict.id: entries[0]} if entries[0] is not None and None not in entries else {}


@final
class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What several runs together show about an entry."""

    entry: str
    target: str
    """The stack or pair that it is about here."""
    judged: int
    """Number of verdicts that show whether its difference is still there."""
    explained: int
    """Number of verdicts that it explains, comparisons included."""
    runs: list[str]
    """The runs in which it explains something."""
    race: bool = False
    """True if the difference does not show in every run, so that the entry is never stale."""

    @property
    def name(self) -> str:
        """Entry and target, as the command shows them."""
        return f"{self.entry} ({self.target})"

    @property
    def stale(self) -> bool:
        """True if verdicts about it were judged and none needs it."""
        return self.judged > 0 and not self.explained and not self.race


def uses(ledger: Ledger, runs: Mapping[str, Sequence[Verdict]]) -> list[Use]:
    """The use of each entry, for each of its targets, in these runs: name → verdicts to which the ledger was applied.

    Raises `LedgerError` for a verdict that is explained by an entry that the ledger does not have.
    """
    for run, verdicts in runs.items():
        if lost := sorted({entry for v in verdicts for entry in _needed(v) if ledger.get(entry) is None}):
            raise LedgerError(
                f"run {run} was judged with entries that the ledger lacks: {', '.join(lost)}",
                next_step=f"judge it again with this ledger: parity judge {run}",
            )
    return [_use(one, runs) for entry in ledger.entries for one in entry.each]


def _needed(verdict: Verdict) -> set[str]:
    """The entries that explain the verdict, or one of its reasons."""
    return {*verdict.explained.values(), *([verdict.known] if verdict.known else [])}


def _use(entry: Entry, runs: Mapping[str, Sequence[Verdict]]) -> Use:
    [target] = entry.targets

    def needs(verdict: Verdict) -> bool:
        pair = f"{verdict.baseline}~{verdict.target}"
        own = verdict.baseline if verdict.status == Parity.BASELINE_DEFECT else verdict.target
        return entry.id in _needed(verdict) and target in (own, pair)

    explained = {run: sum(map(needs, verdicts)) for run, verdicts in runs.items()}
    settled = (v for verdicts in runs.values() for v in verdicts if needs(v) or entry.settled_by(v))
    return Use(
        entry=entry.id,
        target=target,
        judged=sum(1 for _ in settled),
        explained=sum(explained.values()),
        runs=[run for run, count in explained.items() if count],
        race=entry.race is not None,
    )


def _claim(verdict: Verdict, live: Sequence[Entry], claims: Claims, problems: list[LedgerProblem]) -> dict[str, str]:
    """Reason → entry that explains it, for those of the verdict's reasons that have one within its cap."""
    found: dict[str, str] = {}
    for reason in verdict.each_reason:
        matching = [entry for entry in live if entry.explains(verdict, reason)]
        if len(matching) > 1:
            problems.append(
                LedgerProblem(
                    entry=matching[1].id,
                    problem=f"explains what {matching[0].id!r} explains already",
                    next_step="make the two entries disjoint: write one entry per difference",
                )
            )
        for entry in matching[:1]:
            claimed = claims[entry.id, entry.targets[0]]
            if verdict.id not in claimed:
                claimed.append(verdict.id)
            if len(claimed) <= entry.cap:
                found[reason] = entry.id
    return found


def _covered_by(
    verdict: Verdict, stacks: dict[tuple[str, str, str, str], Verdict], known: dict[str, str]
) -> str | None:
    """The entry that explains every failing side of a comparison, if all of them are explained."""
    target, baseline = (
        stacks.get((verdict.scenario, verdict.topology, verdict.check, name or ""))
        for name in (verdict.target, verdict.baseline)
    )
    blamed: list[Verdict | None] = []
    match verdict.status:
        case Parity.REGRESSION:
            blamed = [target]
        case Parity.BASELINE_DEFECT:
            blamed = [baseline]
        case Parity.BOTH_WRONG:
            blamed = [target, baseline]
        case Parity.UNTESTABLE:
            blamed = [v for v in (target, baseline) if v is not None and v.status == Conformance.UNTESTABLE]
        case _:
            pass
    explained = [known.get(side.id) if side is not None else None for side in blamed]
    return explained[0] if explained and all(explained) else None


def _over_cap(entry: Entry, claimed: Sequence[str]) -> Iterable[LedgerProblem]:
    if len(claimed) > entry.cap:
        yield LedgerProblem(
            entry=entry.id,
            problem=f"matches {len(claimed)} verdicts, its cap is {entry.cap}: "
            f"not explained: {', '.join(claimed[entry.cap :][:5])}",
            next_step=f"{entry.owner}: find out why there are more; raise the cap only for the same cause",
        )


def _stale(entry: Entry, verdicts: Sequence[Verdict], known: dict[str, str]) -> Iterable[LedgerProblem]:
    settled = [v for v in verdicts if entry.settled_by(v)]
    changed = [v for v in settled if v.red and v.id not in known]
    if changed:
        now = " | ".join(sorted({f"{v.status}: {v.reason}" for v in changed})[:3])
        wanted = f"{entry.status}: " if entry.status else ""
        yield LedgerProblem(
            entry=entry.id,
            problem=f"the reason changed. The ledger expects: {wanted}{entry.reason} — this run says: {now}",
            next_step=f"{entry.owner}: if the cause is the same, correct the reason; else this is a new difference",
        )
    elif settled:
        yield LedgerProblem(
            entry=entry.id,
            problem=f"matches nothing on {entry.targets[0]}: {len(settled)} verdicts about it were judged and none needs it",
            next_step="the difference is gone there: remove the target, or the entry with its last target",
        )
