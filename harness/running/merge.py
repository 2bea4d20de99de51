"""Merges shards of one run, driven by separate jobs, into one run's folder. Judges nothing.

A shard is the folder of a run of one wave or one topology. Shards that do not belong together are refused before anything is
written. Trained weights stay in the shards, since judging does not read them.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import msgspec

from harness.contract.errors import RecordingError, UsageError
from harness.records.book import Book
from harness.records.index import Index, indices
from harness.records.recording import Header
from harness.records.run_folder import RUNNING, RunFolder, references_in
from harness.records.verdict import RunInfo
from harness.running.catalogue import declared, whole_waves


@final
class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One job's run, complete and read."""

    folder: RunFolder
    info: RunInfo
    seats: list[Index]

    @property
    def path(self) -> Path:
        return self.folder.path


@contextmanager
def merging(shards: Sequence[Path], out: Path) -> Iterator[Path]:
    """Merge shards. Yields the new run's folder for judging, and renames it to `out` after the block.

    Removes it after an error. Raises UsageError for a shard that is missing or does not belong to the others, and if `out`
    is not empty; `RecordingError` for a shard that did not end or is not whole.
    """
    read = [_shard(path) for path in shards]
    _refuse_what_differs(read)
    _refuse_what_was_driven_twice(read)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is not empty", next_step="give another --run-dir; no run is overwritten")
    staging = out.with_name(f".{out.name}-{secrets.token_hex(3)}")
    try:
        with RunFolder.create(staging) as folder:
            _fill(folder, read)
            folder.write_info(_info(read, out.name))
            yield folder.path
        staging.rename(out)
    except BaseException:
        if staging.exists():
            shutil.rmtree(staging)
        raise


def _shard(path: Path) -> Shard:
    folder = RunFolder.existing(path)
    info = folder.info()
    if info.outcome != "completed":
        said = "is still running, or was killed" if info.outcome == RUNNING else f"ended early: {info.outcome}"
        raise RecordingError(f"the shard {path} {said}", next_step="run that job again, and merge its new folder")
    shard = Shard(folder=folder, info=info, seats=indices(folder.recorded()))
    for name, seat in _lost(shard):
        raise RecordingError(
            f"the shard {path} selected {name} on {seat} and did not record it",
            next_step="run that job again, without stopping at a failure, and merge its new folder",
        )
    return shard


def _lost(shard: Shard) -> Iterator[tuple[str, str]]:
    """Scenario and seat of each selected scenario that could have been driven there and was not."""
    seats = {f"{one.header.target}@{one.header.topology.name}": one for one in shard.seats}
    for topology, names in shard.info.selected.items():
        for target, promised in shard.info.declared.items():
            seat = f"{target}@{topology}"
            recorded = seats.get(seat)
            able = set(promised if recorded is None else recorded.header.capabilities)
            driven = recorded.scenarios if recorded is not None else []
            for name in names if seat not in shard.info.not_started else ():
                scenario = declared().get(name)
                if name not in driven and scenario is not None and scenario.needs <= able:
                    yield name, seat


def _refuse_what_differs(shards: Iterable[Shard]) -> None:
    """Raises UsageError for the first fact in which two shards differ but must agree."""
    told: dict[str, tuple[Any, Path]] = {}
    for shard in shards:
        for fact, value in _identity(shard):
            expected, where = told.setdefault(fact, (value, shard.path))
            if value != expected:
                raise UsageError(
                    f"{fact} differs: {_shown(expected, value)} in {where}, {_shown(value, expected)} in {shard.path}",
                    next_step="merge shards of one run only: the same stacks, engine, model and versions",
                )


def _identity(shard: Shard) -> Iterator[tuple[str, Any]]:
    """The facts that all shards of a run share, each with a name to report it by."""
    info = shard.info
    yield "the baseline", info.baseline
    yield "the candidate", info.candidate
    yield "the start", info.start
    yield "the engine", info.engine
    for header in (part.header for seat in shard.seats for part in seat.parts):
        yield from _identity_of_stack(header)


def _identity_of_stack(header: Header) -> Iterator[tuple[str, Any]]:
    target, topology = header.target, header.topology
    yield "the harness", {"version": header.harness_version, "commit": header.commit}
    yield f"the packages of {target}", header.packages
    yield f"the checkout of {target}", None if header.checkout is None else header.checkout.told
    yield f"the capabilities of {target} in {topology.name}", header.capabilities
    yield f"the shape of {topology.name}", msgspec.structs.replace(topology, about="")
    model = {"sha256": header.model_sha256, "dtype": header.model.get("dtype"), "seed": header.seed}
    modes = {"CUDA graphs": header.cuda_graphs, "batch-invariant": header.batch_invariant}
    yield f"how the engines of {target} compute", modes
    yield f"the model of {target}" + (f" for {topology.model}" if topology.model else ""), model


def _shown(value: Any, other: Any) -> str:
    """A value in words; for a dict, only the entries that differ from the other's."""
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{name} {value.get(name)}" for name in value | other if value.get(name) != other.get(name))
    return str(value)


def _refuse_what_was_driven_twice(shards: Iterable[Shard]) -> None:
    driven: dict[tuple[str, str], Path] = {}
    for shard in shards:
        for seat in shard.seats:
            name = f"{seat.header.target}@{seat.header.topology.name}"
            for scenario in seat.scenarios:
                if (before := driven.get((scenario, name))) is not None:
                    raise UsageError(
                        f"{scenario} was driven on {name} in {before} and in {shard.path}",
                        next_step="leave one of them out",
                    )
                driven[scenario, name] = shard.path


def _fill(folder: RunFolder, shards: Sequence[Shard]) -> None:
    """Copy recordings and logs under the shard's number, and unite the reference's answers, one book per model."""
    folder.recordings.mkdir()
    for number, shard in enumerate(shards, start=1):
        for recording in shard.folder.recorded():
            shutil.copyfile(recording, folder.recordings / f"{recording.stem}.{number}{recording.suffix}")
        for logs in sorted((shard.path / "logs").glob("*")):
            shutil.copytree(logs, folder.path / "logs" / f"{logs.name}.{number}", symlinks=True)
    _unite_books(folder, [book for shard in shards for book in references_in(shard.path)])


def _unite_books(folder: RunFolder, books: Iterable[Path]) -> None:
    """One book per model. A shard names its file after the first topology that it drove, so no name identifies a model."""
    by_model: dict[str, list[Path]] = {}
    for book in books:
        by_model.setdefault(Book.load(book).model_sha256, []).append(book)
    written: dict[str, Path] = {}
    for sources in by_model.values():
        name = sources[0].name
        if name in written:
            raise RecordingError(
                f"{written[name]} and {sources[0]} answer about different models", next_step="merge runs of one model"
            )
        Book.unite(folder.path / name, sources)
        written[name] = sources[0]


def _info(shards: Sequence[Shard], run_id: str) -> RunInfo:
    """The whole run: the facts that its jobs share, and the sum of their work. `command` joins the jobs' commands."""
    infos = [shard.info for shard in shards]
    selected: dict[str, dict[str, None]] = {}
    for info in infos:
        for topology, names in info.selected.items():
            selected.setdefault(topology, {}).update(dict.fromkeys(names))
    return RunInfo(
        run_id=run_id,
        created_at=min(info.created_at for info in infos),
        command=" && ".join(info.command for info in infos),
        baseline=infos[0].baseline,
        candidate=infos[0].candidate,
        start=infos[0].start,
        engine=infos[0].engine,
        seconds={
            stage: round(sum(info.seconds.get(stage, 0.0) for info in infos), 2)
            for stage in dict.fromkeys(stage for info in infos for stage in info.seconds)
        },
        whole_waves=sorted({*whole_waves(selected), *(wave for info in infos for wave in info.whole_waves)}),
        selected={topology: list(names) for topology, names in selected.items()},
        declared={target: able for info in infos for target, able in info.declared.items()},
        checkouts={target: tree for info in infos for target, tree in info.checkouts.items()},
        not_started={seat: error for info in infos for seat, error in info.not_started.items()},
    )
