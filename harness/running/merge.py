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

from harness.contract.errors import RecordingError, UsageError
from harness.records.book import Book
from harness.records.run_folder import RunFolder, references_in
from harness.records.verdict import RunInfo
from harness.running.catalogue import whole_waves
from harness.running.earlier import Earlier, Fact, comparable, lost, refuse_what_differs, whole


@contextmanager
def merging(shards: Sequence[Path], out: Path) -> Iterator[Path]:
    """Merge shards. Yields the new run's folder for judging, and renames it to `out` after the block.

    Removes it after an error. Raises UsageError for a shard that is missing or does not belong to the others, and if `out`
    is not empty; `RecordingError` for a shard that did not end or is not whole.
    """
    read = [_shard(path) for path in shards]
    told = ((fact, shard.path) for shard in read for fact in _identity(shard))
    refuse_what_differs(told, "merge shards of one run only: the same stacks, engine, model and versions")
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


def _shard(path: Path) -> Earlier:
    shard = whole(path, "the shard", "run that job again, and merge its new folder")
    for name, seat in lost(shard, shard.info.selected, shard.info.declared):
        raise RecordingError(
            f"the shard {path} selected {name} on {seat} and did not record it",
            next_step="run that job again, without stopping at a failure, and merge its new folder",
        )
    return shard


def _identity(shard: Earlier) -> Iterator[Fact]:
    """The facts that all shards of a run share."""
    info = shard.info
    yield "the baseline", info.baseline
    yield "the candidate", info.candidate
    yield "the earlier run of the baseline", None if info.recorded is None else Path(info.recorded).name
    yield "the start", info.start
    yield "the engine", info.engine
    yield "the profile", info.profile
    for header in (part.header for seat in shard.seats for part in seat.parts):
        target, topology = header.target, header.topology
        yield "the harness", {"version": header.harness_version, "commit": header.commit}
        yield f"the packages of {target}", header.packages
        yield f"the checkout of {target}", None if header.checkout is None else header.checkout.told
        yield f"the capabilities of {target} in {topology.name}", header.capabilities
        yield from comparable(header, target)


def _refuse_what_was_driven_twice(shards: Iterable[Earlier]) -> None:
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


def _fill(folder: RunFolder, shards: Sequence[Earlier]) -> None:
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
        by_model.setdefault(Book.model_of(book), []).append(book)
    written: dict[str, Path] = {}
    for sources in by_model.values():
        name = sources[0].name
        if name in written:
            raise RecordingError(
                f"{written[name]} and {sources[0]} answer about different models", next_step="merge runs of one model"
            )
        Book.united(folder.path / name, sources).close()
        written[name] = sources[0]


def _info(shards: Sequence[Earlier], run_id: str) -> RunInfo:
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
        recorded=infos[0].recorded,
        start=infos[0].start,
        engine=infos[0].engine,
        profile=infos[0].profile,
        seconds={
            stage: round(sum(info.seconds.get(stage, 0.0) for info in infos), 2)
            for stage in dict.fromkeys(stage for info in infos for stage in info.seconds)
        },
        whole_waves=sorted({*whole_waves(selected), *(wave for info in infos for wave in info.whole_waves)}),
        selected={topology: list(names) for topology, names in selected.items()},
        contract={name: hashed for info in infos for name, hashed in info.contract.items()},
        declared={target: able for info in infos for target, able in info.declared.items()},
        checkouts={target: tree for info in infos for target, tree in info.checkouts.items()},
        not_started={seat: error for info in infos for seat, error in info.not_started.items()},
    )
