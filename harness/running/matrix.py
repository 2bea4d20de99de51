"""A matrix of runs: targets × topologies × waves. Each cell is an ordinary run of one target in its own process and folder.

::

    plan.json                       every cell that was ever asked for in this folder, those of other shards too
    cells/<target>@<topology>-waveN/      the cell's run
    cells/<target>@<topology>-waveN.log   what `parity run` printed
    cells/<target>@<topology>-waveN.json  what the cell came to; a cell without this file, or without its run, is driven again
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, final

import msgspec
from filelock import FileLock, Timeout

import harness
from harness import PROJECT
from harness.contract import devices
from harness.contract import topology as topologies
from harness.contract.checkout import Checkout
from harness.contract.errors import Blame, HarnessError, RecordingError, UsageError
from harness.driving.process import log_tail
from harness.judging.judge import absent, missing
from harness.machine import checkouts
from harness.machine.progress import Progress
from harness.machine.targets import for_target, known
from harness.records.run_folder import RunFolder, stem
from harness.records.verdict import RunInfo, Verdict
from harness.running import child
from harness.running.catalogue import declared, matching
from harness.running.cluster import Cluster, Task
from harness.running.session import commit

T = TypeVar("T")

SAID = re.compile(r"(parity|[A-Z]\w+): .+")
"""A line of a cell's log that names an error."""


@final
class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One target in one topology, with the scenarios of one wave."""

    target: str
    topology: str
    wave: int

    @property
    def name(self) -> str:
        """Its name, fit for a file."""
        return f"{stem(self.target, self.topology)}-wave{self.wave}"

    def __str__(self) -> str:
        return f"{self.target} @ {self.topology}, wave {self.wave}"


@final
class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to drive in a cell, and with which harness."""

    cell: Cell
    scenarios: list[str]
    arguments: list[str]
    """Options of `parity run`."""
    version: str = harness.__version__
    commit: str | None = None
    tree: Checkout | None = None
    """The source tree of a local target, as it was when the cell was ordered."""

    def differs_from(self, other: Order) -> list[str]:
        """The facts in which two orders for one cell differ, in words."""
        facts = {
            "the harness": (f"{self.version} {self.commit}", f"{other.version} {other.commit}"),
            "the options": (" ".join(self.arguments), " ".join(other.arguments)),
            "the checkout": tuple(one.tree.told if one.tree else "" for one in (self, other)),
        }
        found = [
            f"{fact} ({now or 'none'}, was {then or 'none'})" for fact, (now, then) in facts.items() if now != then
        ]
        new, gone = set(self.scenarios) - set(other.scenarios), set(other.scenarios) - set(self.scenarios)
        return found + [f"the selection ({len(new)} scenarios more, {len(gone)} fewer)"] * bool(new or gone)


@final
class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell came to."""

    order: Order
    exit_status: int
    """Of `parity run`."""
    seconds: float
    failed: str = ""
    """Why the cell has no whole run; empty for a run that was completed and judged, whatever its verdicts."""
    offered: bool = True
    """False if the target offers none of the cell's scenarios: they are missing, and nothing was driven."""

    @property
    def told(self) -> str:
        if self.failed:
            words = f"failed: {self.failed}"
        elif not self.offered:
            words = "nothing to drive, the stack offers none of it"
        else:
            words = "red" if self.exit_status else "green"
        return f"{self.order.cell}: {words}, {self.seconds:.0f} s"


def plan(
    targets: Sequence[str],
    places: Sequence[str] = (),
    waves: Sequence[int] = (),
    expression: str = "",
    *,
    arguments: Sequence[str] = (),
    pythons: Mapping[str, Path] | None = None,
    trees: Mapping[str, Path] | None = None,
) -> list[Order]:
    """The cells in the order in which they are driven: by target, topology, wave. Cells without a scenario are left out.

    Without `places` or `waves` all of them. `arguments` are for every cell's `parity run`, `pythons` and `trees` as in `resolve`.
    Raises UsageError for an unknown topology, a checkout that is none, and if no scenario is selected.
    """
    for place in places:
        topologies.topology(place)
    selected = matching(expression, declared().values())
    now = commit()
    states = {target: _tree(target, for_target(target, trees)) for target in targets}
    found = [
        Order(
            cell=Cell(target=target, topology=place, wave=wave),
            scenarios=names,
            arguments=[
                *_of_local("--python", target, pythons or {}),
                *_of_local("--checkout", target, trees or {}),
                *arguments,
            ],
            commit=now,
            tree=states[target],
        )
        for target in dict.fromkeys(targets)
        for place in topologies.names()
        for wave in sorted({s.wave for s in selected})
        if (not places or place in places) and (not waves or wave in waves)
        if (names := sorted(s.name for s in selected if s.wave == wave and place in s.topologies))
    ]
    if not found:
        raise UsageError(
            "no cell of the matrix has a scenario", next_step="`parity topologies` lists the waves of each"
        )
    return found


def _of_local(option: str, target: str, paths: Mapping[str, Path]) -> list[str]:
    """An option that a local target needs. `parity run` refuses it for others."""
    chosen = for_target(target, paths)
    return [option, str(chosen)] if chosen is not None and known(target).local else []


def _tree(target: str, path: Path | None) -> Checkout | None:
    """The present state of a local target's source tree; None without one."""
    layout = known(target).runs_on.source
    return None if path is None or layout is None or not known(target).local else checkouts.read(path, layout)


def shard_of(orders: Sequence[Order], shard: str) -> list[Order]:
    """The cells of shard "2/8": every eighth, from the second on. Raises UsageError for another form."""
    part, _, parts = shard.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise UsageError(
            f"--shard {shard!r} is no part of a whole", next_step="write --shard 2/8 for the second of eight"
        )
    return list(orders[int(part) - 1 :: int(parts)])


@final
class MatrixFolder:
    """The folder of a matrix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells = path / "cells"
        self._plan = path / "plan.json"

    @classmethod
    def is_one(cls, path: Path) -> bool:
        return (path / "plan.json").is_file()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, and keep other commands out of it. Raises UsageError if one works in it."""
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path / "matrix.lock", timeout=0):
                yield
        except Timeout as e:
            raise UsageError(
                f"another `parity matrix` works in {self.path}", next_step="wait for it, or give another --run-dir"
            ) from e

    def planned(self) -> list[Order]:
        """Every cell that was ever asked for. Raises `RecordingError` for a file that does not parse."""
        return _read(self._plan, list[Order]) if self._plan.is_file() else []

    def extend(self, orders: Iterable[Order]) -> None:
        """Note the wanted cells. An order replaces an older one for the same cell."""
        every = {one.cell: one for one in self.planned()} | {one.cell: one for one in orders}
        _write(self._plan, list(every.values()))

    def run_of(self, cell: Cell) -> Path:
        return self.cells / cell.name

    def outcome(self, cell: Cell) -> Outcome | None:
        """What a cell came to; None for one that was not driven, or not to its end, or whose run is gone."""
        path = self.cells / f"{cell.name}.json"
        if not path.is_file():
            return None
        found = _read(path, Outcome)
        return found if found.failed or self.run_of(cell).is_dir() else None

    def outcomes(self) -> list[Outcome]:
        """The driven cells, in the order of the plan. A cell that was last driven for another order is not driven yet."""
        found = ((one, self.outcome(one.cell)) for one in self.planned())
        return [outcome for one, outcome in found if outcome is not None and not one.differs_from(outcome.order)]

    def to_drive(self, orders: Sequence[Order], *, again: bool = False) -> list[Order]:
        """The cells that are not finished. With `again`, finished ones that another harness or selection drove as well.

        Raises UsageError for those without `again`.
        """
        changed: dict[Cell, list[str]] = {}
        left: list[Order] = []
        for one in orders:
            found = self.outcome(one.cell)
            if found is None or found.failed:
                left.append(one)
            elif said := one.differs_from(found.order):
                changed[one.cell] = said
                left.append(one)
        if changed and not again:
            cell, said = next(iter(changed.items()))
            raise UsageError(
                f"{len(changed)} finished cells of {self.path} were driven with something else; first {cell}: {', '.join(said)}",
                next_step="add --again to drive these again, or give another --run-dir",
            )
        return left

    def command(self, order: Order, launch: Sequence[str]) -> list[str]:
        """The command line that drives a cell. `launch` is that of `parity run`. What an earlier attempt left is moved aside.

        Raises UsageError if the harness or the tree is not the one that the cell was ordered for: its run could not be merged.
        """
        if (now := commit()) != order.commit:
            raise UsageError(
                f"the harness changed since the matrix began: {order.commit} then, {now} now",
                next_step="finish the change, then give the same command again; finished cells are kept",
            )
        if order.tree is not None and (tree := _tree(order.cell.target, Path(order.tree.path))) != order.tree:
            raise UsageError(
                f"{order.tree.path} changed since the matrix began: {order.tree.told} then, {tree and tree.told} now",
                next_step="leave the tree alone while it is driven, or drive a worktree of it",
            )
        cell = order.cell
        self._set_aside(cell)
        where = ["--stack", cell.target, "--wave", str(cell.wave), "--topology", cell.topology]
        return [*launch, *where, "--run-dir", str(self.run_of(cell).absolute()), *order.arguments]

    def log_of(self, cell: Cell) -> Path:
        return self.cells / f"{cell.name}.log"

    def end(self, order: Order, status: int, seconds: float, failed: str = "") -> Outcome:
        """Note what a cell came to. `failed` says why its command did not run to its end."""
        failed = failed or self._why_failed(order, status, self.log_of(order.cell))
        found = Outcome(
            order=order,
            exit_status=status,
            seconds=round(seconds, 1),
            failed=failed,
            offered=bool(failed or RunFolder.existing(self.run_of(order.cell)).recorded()),
        )
        _write(self.cells / f"{order.cell.name}.json", found)
        return found

    def _set_aside(self, cell: Cell) -> None:
        earlier = [path for path in (self.run_of(cell), *self.cells.glob(f"{cell.name}.*")) if path.exists()]
        if earlier:
            attempts = self.cells / "earlier"
            attempts.mkdir(exist_ok=True)
            number = len(list(attempts.glob(f"{cell.name}.*"))) + 1
            (aside := attempts / f"{cell.name}.{number}").mkdir()
            for path in earlier:
                path.rename(aside / path.name)

    def _why_failed(self, order: Order, status: int, log: Path) -> str:
        """Why the cell's run is not whole; empty if it is."""
        if status not in (0, 1):
            signalled = status < 0
            return (
                f"ended by {signal.Signals(-status).name}" if signalled else f"exit status {status}: {_error_in(log)}"
            )
        try:
            info = RunFolder.existing(self.run_of(order.cell)).info()
        except HarnessError:
            return f"it wrote no run: {_error_in(log)}"
        if info.outcome != "completed":
            return f"the run is not whole: {info.outcome}"
        if (now := commit()) != order.commit:
            return f"the harness changed while it was driven: {order.commit} then, {now} now"
        driven = info.selected.get(order.cell.topology, [])
        if set(driven) != set(order.scenarios):
            return f"it selected {len(driven)} scenarios where the matrix selects {len(order.scenarios)}"
        return ""


def drive(
    folder: MatrixFolder,
    orders: Sequence[Order],
    launch: Sequence[str],
    progress: Progress,
    told: Callable[[Outcome], None],
) -> None:
    """Drive these cells one after the other, in a process each. One that fails does not keep the others from being driven.

    After Ctrl-C the process has ended, and its cell has no outcome.
    """
    for number, order in enumerate(orders, start=1):
        with progress(f"cell {number} of {len(orders)}: {order.cell}"):
            command, began = folder.command(order, launch), time.monotonic()
            status = child.run(command, folder.log_of(order.cell))
            outcome = folder.end(order, status, time.monotonic() - began)
        told(outcome)


def drive_on(
    cluster: Cluster,
    folder: MatrixFolder,
    orders: Sequence[Order],
    launch: Sequence[str],
    *,
    progress: Progress,
    told: Callable[[Outcome], None],
) -> None:
    """Drive these cells as tasks of a Ray cluster, each with the GPUs of its topology, or on CPUs with a core a worker.

    A cell that was interrupted has no outcome.
    """
    by_name = {order.cell.name: order for order in orders}
    tasks = [_task(folder, order, launch, cluster.engine) for order in orders]
    running: set[str] = set()
    with progress(f"{len(orders)} cells as tasks of the Ray cluster at {cluster.address}") as say:
        for event in cluster.run(tasks, folder.path / "cluster.log"):
            if event.event == "started":
                running.add(event.name)
                say(f"{by_name[event.name].cell} runs on {event.node}, {len(running)} at once")
                continue
            running.discard(event.name)
            told(folder.end(by_name[event.name], event.status, event.seconds, event.reason))


def _task(folder: MatrixFolder, order: Order, launch: Sequence[str], engine: str) -> Task:
    place = topologies.topology(order.cell.topology, _engines(order.arguments))
    place = topologies.colocated(place) if "--colocate" in order.arguments else place
    return Task(
        name=order.cell.name,
        command=folder.command(order, launch),
        folder=PROJECT,
        log=folder.log_of(order.cell).absolute(),
        cpus=place.world_size,
        gpus=devices.needed(place) if engine == "cuda" else 0,
    )


def _engines(arguments: Sequence[str]) -> int:
    """The number of engines that options of `parity run` ask for."""
    words = [part for word in arguments for part in word.split("=", 1)]
    return int(words[words.index("--engines") + 1]) if "--engines" in words[:-1] else topologies.DEFAULT_ENGINES


def not_driven(outcome: Outcome) -> list[Verdict]:
    """The verdicts on a cell that failed: each of its scenarios is untestable, with the reason."""
    cell, reason = outcome.order.cell, f"the cell {outcome.order.cell} was not driven: {outcome.failed}"
    chosen = (declared()[name] for name in outcome.order.scenarios if name in declared())
    return [v for one in chosen for v in absent(one, cell.target, cell.topology, reason, Blame.ENVIRONMENT)]


def not_offered(run: RunInfo, target: str, judged: Iterable[Verdict]) -> list[Verdict]:
    """The verdicts `missing` on selected scenarios that the run has no verdict about, because the target lacks what they need.

    Judging a part of a wave leaves these out (`judge_run`); in a matrix they are no gap in the driving.
    """
    said = run.declared.get(target, [])
    able = {h["topology"]["name"]: h["capabilities"] for h in run.headers if h.get("target") == target}
    seen = {(verdict.scenario, verdict.topology) for verdict in judged if verdict.target == target}
    return [
        verdict
        for place, names in run.selected.items()
        for name in names
        if (name, place) not in seen and name in declared()
        for verdict in missing(declared()[name], target, place, able.get(place, said), said)
    ]


def _error_in(log: Path) -> str:
    """The error that a cell's log names, on one line, else its last line."""
    lines = [line.strip() for line in log_tail(log).splitlines() if line.strip()]
    named = [number for number, line in enumerate(lines) if SAID.fullmatch(line)]
    return "; ".join(lines[named[0] : named[0] + 2]) if named else (lines or ["it printed nothing"])[-1]


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as e:
        raise RecordingError(f"{path} does not say what was driven: {e}", next_step="remove it, and drive again") from e


def _write(path: Path, value: object) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    partial.replace(path)
