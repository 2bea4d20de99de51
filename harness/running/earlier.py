"""Runs that were made earlier: read whole, compared fact by fact, and taken over into another run.

Merging shards, comparing two runs, and a run whose baseline is a recording (`--baseline RUN`) rest on these.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import msgspec

from harness.contract.checkout import Checkout
from harness.contract.errors import RecordingError, UsageError
from harness.records import excerpt
from harness.records.book import Book
from harness.records.index import Index, indices
from harness.records.recording import Header, header_of
from harness.records.run_folder import RUNNING, RunFolder, references_in, stem
from harness.records.verdict import RunInfo
from harness.running.catalogue import contract, declared, defined_in

Fact = tuple[str, Any]
"""What two runs have to share: a name to report it by, and its value."""


@final
class Earlier(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ended, and was read whole."""

    folder: RunFolder
    info: RunInfo
    seats: list[Index]

    @property
    def path(self) -> Path:
        return self.folder.path


def whole(path: Path, what: str, next_step: str) -> Earlier:
    """The run in a folder. `what` names its part in a message, such as "the shard"; `next_step` is for one that did not complete.

    Raises UsageError for a folder without a run, `RecordingError` for a run that did not complete or is not whole.
    """
    folder = RunFolder.existing(path)
    info = folder.info()
    if info.outcome != "completed":
        said = "is still running, or was killed" if info.outcome == RUNNING else f"ended early: {info.outcome}"
        raise RecordingError(f"{what} {path} {said}", next_step=next_step)
    return Earlier(folder=folder, info=info, seats=indices(folder.recorded()))


def lost(run: Earlier, selected: Mapping[str, Iterable[str]], targets: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Scenario and seat of each selected scenario (topology → names) that these targets could have been driven in and were not."""
    seats = {f"{one.header.target}@{one.header.topology.name}": one for one in run.seats}
    for topology, names in selected.items():
        for target in targets:
            seat = f"{target}@{topology}"
            recorded = seats.get(seat)
            able = set(run.info.declared.get(target, ()) if recorded is None else recorded.header.capabilities)
            driven = recorded.scenarios if recorded is not None else []
            for name in names if seat not in run.info.not_started else ():
                scenario = declared().get(name)
                if name not in driven and scenario is not None and scenario.needs <= able:
                    yield name, seat


def refuse_what_differs(told: Iterable[tuple[Fact, object]], next_step: str) -> None:
    """Raises UsageError for the first fact with two values. `told` has each fact with the place that tells it."""
    first: dict[str, tuple[Any, object]] = {}
    for (fact, value), where in told:
        expected, before = first.setdefault(fact, (value, where))
        if value != expected:
            raise UsageError(
                f"{fact} differs: {_shown(expected, value)} in {before}, {_shown(value, expected)} in {where}",
                next_step=next_step,
            )


def _shown(value: Any, other: Any) -> str:
    """A value in words; for a dict, only the entries that differ from the other's."""
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{name} {value.get(name)}" for name in value | other if value.get(name) != other.get(name))
    return str(value)


def comparable(header: Header, whose: str) -> Iterator[Fact]:
    """The facts of a recording without which its outputs cannot be compared with another's."""
    topology = header.topology
    yield f"the shape of {topology.name}", msgspec.structs.replace(topology, about="")
    model = {"sha256": header.model_sha256, "dtype": header.model.get("dtype"), "seed": header.seed}
    modes = {"CUDA graphs": header.cuda_graphs, "batch-invariant": header.batch_invariant}
    yield f"how the engines of {whose} compute", modes
    yield "the budget", header.budget
    yield f"the model of {whose}" + (f" for {topology.model}" if topology.model else ""), model


def target_of(run: RunFolder, role: Literal["baseline", "candidate"]) -> str:
    """The target whose recordings of a run stand for a role: the run's own, or its only one. Raises UsageError if it has neither."""
    info = run.info()
    targets = sorted({header_of(path).target for path in run.recorded()})
    wanted = info.baseline if role == "baseline" else info.candidate
    if wanted in targets:
        return wanted
    if len(targets) != 1:
        raise UsageError(
            f"{run.path} holds recordings of {', '.join(targets) or 'nothing'}, and none is its {role}",
            next_step="name the recording's file",
        )
    return targets[0]


def told_apart(target: str, run: str, taken: str) -> str:
    """The target's name; if it is `taken`, with its run's name added."""
    return f"{target} in {run}" if target == taken else target


# --- a baseline that was recorded earlier


class Baseline:
    """The recordings of a baseline in an earlier run, for a run that drives the candidate alone."""

    def __init__(self, path: Path, name: str, selected: Mapping[str, Sequence[str]]) -> None:
        """`name`: the baseline's name in the new run. `selected`: topology → the scenarios of the new run.

        Raises UsageError or `RecordingError` for a run without a baseline, that did not complete, or that does not hold them.
        """
        self.target = target_of(RunFolder.existing(path), "baseline")
        command = f"parity run --stack {self.target.partition(' in ')[0]} --twin"
        self._again = f"record the baseline again: {command}, with this run's --wave and --topology"
        self.run = whole(path, "the baseline's run", self._again)
        self.name, self.selected = name, selected
        self.seats = {
            one.header.topology.name: one
            for one in self.run.seats
            if one.header.target == self.target and one.header.topology.name in selected
        }
        self._refuse_gaps()
        self._refuse_another_contract()

    @property
    def checkouts(self) -> dict[str, Checkout]:
        """The baseline's source tree, by its name in the new run; empty if it ran from its environment."""
        tree = self.run.info.checkouts.get(self.target)
        return {} if tree is None else {self.name: tree}

    @property
    def declared(self) -> list[Any]:
        """The capabilities that the baseline declared before its start."""
        return self.run.info.declared.get(self.target, [])

    def _refuse_gaps(self) -> None:
        for topology in self.selected:
            if (error := self.run.info.not_started.get(f"{self.target}@{topology}")) is not None:
                said = f"{self.target} did not start in {topology} in {self.run.path}: {error.said}"
                raise UsageError(said, next_step=f"select other topologies, or {self._again}")
        missing = list(lost(self.run, self.selected, [self.target]))
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UsageError(
                f"{self.run.path} has no recording of {missing[0][0]} on {missing[0][1]}{more}",
                next_step=f"select only what it holds (--wave, --topology, -k), or {self._again}",
            )

    def _refuse_another_contract(self) -> None:
        """Refuse a recording that was driven by other definitions than the new run's."""
        then, now = self.run.info.contract, contract()
        if not then:
            raise UsageError(
                f"{self.run.path} does not say by which scenarios it was driven: an older harness made it",
                next_step=self._again,
            )
        needed = [name for name in now if name not in defined_in().values()]
        needed += [defined_in()[name] for names in self.selected.values() for name in names]
        changed = [name for name in dict.fromkeys(needed) if then.get(name) != now[name]]
        if changed:
            raise UsageError(
                f"the contract changed since {self.run.path} was recorded: {', '.join(changed)}", next_step=self._again
            )

    def refuse_without_any_twin(self) -> None:
        """Raises UsageError for a recording in which selected scenarios could have a second take, and none has: it shows no noise."""
        selected = ((seat, name) for topology, seat in self.seats.items() for name in self.selected[topology])
        takes = [len(seat.takes(name)) for seat, name in selected if not declared()[name].once]
        if max(takes, default=0) == 1:
            raise UsageError(
                f"{self.run.path} has no twin of any selected scenario on {self.target}: no noise floor",
                next_step=f"{self._again}; or add --no-twin, which compares no log-probabilities",
            )

    def refuse_unless_it_fits(self, coming: Header) -> None:
        """Raises UsageError for a fact in which the recording differs from what the new run would record in that topology."""
        seat = self.seats.get(coming.topology.name)
        headers = [] if seat is None else [part.header for part in seat.parts]
        told: list[tuple[Fact, object]] = [(fact, "this run") for fact in self._facts(coming)]
        told += [(fact, self.run.path) for header in headers for fact in self._facts(header)]
        refuse_what_differs(told, f"run with the recording's, or {self._again}")

    @staticmethod
    def _facts(header: Header) -> Iterator[Fact]:
        yield "the harness version", header.harness_version
        yield "the engine", header.engine
        yield "the start", header.start
        yield from comparable(header, header.topology.name)

    def take_over(self, folder: RunFolder) -> dict[str, Index]:
        """Copy the selected recordings and their logs into the new run's folder. Returns the copies, by seat."""
        for topology, seat in self.seats.items():
            for number, part in enumerate(seat.parts, start=1):
                to = folder.recordings / f"{stem(self.name, topology)}{f'.{number}' * (len(seat.parts) > 1)}.jsonl"
                excerpt.take_over(part.path, to, set(self.selected[topology]), self.name)
            # Merging numbers the logs of several parts.
            own = re.compile(re.escape(stem(self.target, topology)) + r"(\.\d+)?")
            for logs in sorted(one for one in (self.run.path / "logs").glob("*") if own.fullmatch(one.name)):
                to = (
                    folder.path / "logs" / logs.name.replace(self.target.replace(":", "_"), self.name.replace(":", "_"))
                )
                shutil.copytree(logs, to, symlinks=True)
        return {f"{self.name}@{one.header.topology.name}": one for one in indices(folder.recorded())}

    def books(self, model_sha256: str) -> list[Path]:
        """The files with the reference's answers about a model."""
        return [path for path in references_in(self.run.path) if Book.model_of(path) == model_sha256]
