"""Shards of a run are judged as one run. Shards that do not belong together are refused without leaving files."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest

from harness.contract.capability import Capability
from harness.contract.checkout import Checkout
from harness.contract.errors import HarnessError, RecordingError, UsageError
from harness.contract.topology import Topology, topology
from harness.machine.progress import silent
from harness.records.book import Book
from harness.records.recording import CallError
from harness.records.reference import Next, NextRequest, Noise, NoiseRequest
from harness.records.run_folder import RunFolder
from harness.records.verdict import Judgement
from harness.running import catalogue, earlier
from harness.running import run as running
from harness.running.merge import merging
from harness.running.run import judge_run
from harness.running.session import Options, Seat, Session
from reports.render import write_all
from tests import recordings

TODAY = datetime.date(2026, 1, 1)
A, B = NAMES = ["module.test_a", "module.test_b"]
OLD, NEW = "stack:old", "stack:new"
ASKED = NextRequest(version=0, prompt=[1])


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """Replaces the project's scenarios by those of these tests, which a test may change."""
    found = {name: recordings.declared(name) for name in NAMES}
    for room in (running, catalogue, earlier):
        monkeypatch.setattr(room, "declared", lambda: found)
    return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "whole"


def shard(path: Path, *names: str, about=None, place: Topology | None = None, **info) -> Path:
    """A finished run of these scenarios on both stacks, in one topology; `about` are fields of each header."""
    place = place or Topology()
    with RunFolder.create(path) as folder:
        for target, takes in ((OLD, 2), (NEW, 1)):
            fields = {"topology": place} | (about or {})
            recordings.write(folder.recording(target, place), target, list(names), takes=takes, about=fields)
            logs = folder.logs(target, place)
            logs.mkdir(parents=True)
            (logs / "host.log").write_text(path.name)
        Book.create(folder.reference, recordings.MODEL).close()
        selected = {place.name: list(names)}
        fields = {
            "selected": selected,
            "whole_waves": catalogue.whole_waves(selected),
            "declared": {OLD: list(Capability), NEW: list(Capability)},
        }
        folder.write_info(recordings.info(**(fields | info)))
    return path


def merged(out: Path, *shards: Path, ledger: Path | None = None) -> Judgement:
    with merging(shards, out) as folder:
        return judge_run(folder, ledger=ledger, today=TODAY)


def verdicts(judgement: Judgement) -> set[tuple]:
    return {(v.id, v.status, v.reason, v.facts, v.takes) for v in judgement.verdicts}


def test_shards_of_one_seat_are_judged_as_the_run_that_drove_both(tmp_path, out, ledger):
    whole = judge_run(shard(tmp_path / "one", *NAMES), ledger=ledger, today=TODAY)
    two = merged(out, shard(tmp_path / "a", A), shard(tmp_path / "b", B), ledger=ledger)
    assert verdicts(two) == verdicts(whole)
    assert two.noise == whole.noise
    assert two.run.run_id == "whole"
    assert len(two.run.headers) == 4
    assert judge_run(out, ledger=ledger, today=TODAY).verdicts == two.verdicts, "the folder is judged like any other"
    assert (out / "logs" / "stack_old@disaggregated.2" / "host.log").read_text() == "b"
    assert {path.name for path in out.parent.iterdir()} == {"whole"}
    assert verdicts(merged(tmp_path / "again", out, ledger=ledger)) == verdicts(whole), "and merged like any other"


def test_runs_of_the_miniature_add_up_to_the_run_that_drove_all(tmp_path, out, monkeypatch):
    monkeypatch.undo()
    names = [name for name in catalogue.declared() if name.startswith(("ordering.", "routing."))][:6]

    def drive(folder: Path, some: list[str]) -> Path:
        options = Options(baseline="miniature", candidate="miniature:retry", engine="cpu", run_dir=folder)
        session = Session(options, silent)
        for target in options.targets:
            for name in some:
                scenario = catalogue.declared()[name]
                session.drive(scenario, Seat(target=target, topology=topology("disaggregated")), catalogue.body(name))
        session.close()
        return folder

    whole = judge_run(drive(tmp_path / "one", names), today=TODAY)
    shards = [drive(tmp_path / "a", names[::2]), drive(tmp_path / "b", names[1::2])]
    with merging(shards, out) as folder:
        two = judge_run(folder, today=TODAY)
        write_all(two, folder)
    assert whole.verdicts
    assert verdicts(two) == verdicts(whole)
    assert all((out / name).is_file() for name in ("report.html", "report.md", "report.json", "junit.xml"))


def test_each_scenario_keeps_the_header_of_the_start_that_it_was_driven_on(tmp_path, out, ledger):
    """Two jobs name their servers differently: under the first job's header, all of the second's observations would be unknown."""

    def elsewhere(event):
        server = getattr(event, "server", None)
        return event if server is None else msgspec.structs.replace(event, server=f"far-{server}")

    near, far = shard(tmp_path / "near", A), tmp_path / "far"
    with RunFolder.create(far) as folder:
        for target in (OLD, NEW):
            about = {"servers": [f"far-{name}" for name in recordings.SERVERS]}
            path = folder.recording(target, Topology())
            recordings.write(path, target, [B], change=elsewhere, about=about)
        recordings.book(folder.reference)
        folder.write_info(recordings.info())
    judgement = merged(out, near, far, ledger=ledger)
    assert judgement.exit_status == 0
    assert {tuple(header["servers"]) for header in judgement.run.headers} == {
        ("server-0", "server-1"),
        ("far-server-0", "far-server-1"),
    }


def test_waves_split_by_topology_are_whole_again(tmp_path, out, ledger, declared):
    for name in NAMES:
        declared[name] = recordings.declared(name, topologies=("disaggregated", "colocated"))
    places = [topology(name) for name in ("disaggregated", "colocated")]
    shards = [shard(tmp_path / place.name, *NAMES, place=place) for place in places]
    assert merged(out, *shards, ledger=ledger).run.whole_waves == [1]
    assert merged(out.with_name("part"), *shards[:1], ledger=ledger).run.whole_waves == []


def test_a_stack_that_did_not_start_in_one_shard_is_told_of(tmp_path, out, ledger):
    error = CallError(kind="StartFailed", message="no memory", blame="environment")
    with RunFolder.create(tmp_path / "b") as folder:
        recordings.write(folder.recording(OLD, Topology()), OLD, [B])
        folder.write_info(recordings.info(not_started={f"{NEW}@disaggregated": error}))
    judgement = merged(out, shard(tmp_path / "a", A), tmp_path / "b", ledger=ledger)
    gone = {v.reason for v in judgement.verdicts if v.scenario == B and v.target == NEW and v.baseline is None}
    assert gone == {"did not start: StartFailed: no memory"}
    assert judgement.exit_status == 1


# --- the reference's answers


def answer(run: Path, *logprobs: float, model: str = recordings.MODEL) -> None:
    book = run / "reference.jsonl"
    book.unlink()
    with Book.create(book, model) as written:
        written.add(ASKED, Next(logprobs=list(logprobs)))


def test_reference_answers_are_united_and_rounding_keeps_the_first(tmp_path, out, ledger):
    a, b = shard(tmp_path / "a", A), shard(tmp_path / "b", B)
    answer(a, -0.5, -1.5)
    answer(b, -0.5 + 1e-7, -1.5)
    with Book.create(b / "reference-qwen3_moe.jsonl", "another") as book:
        book.add(ASKED, Next(logprobs=[0.0]))
    merged(out, a, b, ledger=ledger)
    assert Book.of(recordings.MODEL, out).next(ASKED).logprobs == [-0.5, -1.5]
    assert Book.of("another", out).next(ASKED).logprobs == [0.0]


def test_what_rounding_moves_is_each_machines_own(tmp_path, out, ledger):
    a, b = shard(tmp_path / "a", A), shard(tmp_path / "b", B)
    for run, largest in ((a, 0.5), (b, 0.6)):
        (run / "reference.jsonl").unlink()
        with Book.create(run / "reference.jsonl", recordings.MODEL) as book:
            book.add(NoiseRequest(), Noise(numbers=9, largest=largest))
    merged(out, a, b, ledger=ledger)
    assert Book.of(recordings.MODEL, out).noise(NoiseRequest()).largest == 0.5


def test_one_model_has_one_book_whatever_its_files_are_called(tmp_path, out, ledger):
    """A shard with only `moe` topologies names its book after them, even if the run has one model for all."""
    a, b = shard(tmp_path / "a", A), shard(tmp_path / "b", B)
    answer(a, -0.5)
    (a / "reference.jsonl").rename(a / "reference-qwen3_moe.jsonl")
    merged(out, a, b, ledger=ledger)
    assert [path.name for path in out.glob("reference*")] == ["reference-qwen3_moe.jsonl"]
    assert Book.of(recordings.MODEL, out).next(ASKED).logprobs == [-0.5]


# --- what is refused


HEADER = {
    "model": {"name": "tiny", "sha256": recordings.MODEL, "dtype": "float32"},
    "packages": {"vllm": "1", "ray": "2"},
}


def half(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("info", "about", "says"),
    [
        ({"baseline": "stack:other"}, {}, "the baseline differs: stack:old in .*/a, stack:other in .*/b"),
        ({"candidate": None}, {}, "the candidate differs: stack:new in .*/a, None in .*/b"),
        ({"recorded": "/runs/monday"}, {}, "the earlier run of the baseline differs: None in .*/a, monday in"),
        ({"start": "fork"}, {}, "the start differs: ray in .*/a, fork in"),
        ({"engine": "cuda"}, {}, "the engine differs: cpu in .*/a, cuda in"),
        ({}, {"model": HEADER["model"] | {"dtype": "bfloat16"}}, "model of stack:old differs|dtype bfloat16"),
        ({}, {"model": HEADER["model"] | {"sha256": "f" * 64}}, "the model of stack:.* differs: sha256 000.*, sha256 fff"),
        ({}, {"cuda_graphs": True}, "how the engines of stack:.* compute differs: CUDA graphs False in .*, CUDA graphs True in"),
        ({}, {"batch_invariant": True}, "how the engines of stack:.* compute differs: batch-invariant False in .*"),
        ({}, {"seed": 7}, "the model of stack:.* differs: seed 0 in .*, seed 7 in"),
        ({}, {"packages": {"vllm": "9", "ray": "2"}}, "the packages of stack:.* differs: vllm 1 in .*, vllm 9 in"),
        ({}, {"packages": {"vllm": "1"}}, "the packages of stack:.* differs: ray 2 in .*, ray None in"),
        (
            {},
            {"checkout": Checkout(path="/x", commit="beef", versions={"stack": "1"})},
            "the checkout of stack:.* differs: None in .*, stack 1, commit beef .no branch.",
        ),
        ({}, {"commit": "beef"}, "the harness differs: commit None in .*, commit beef in"),
        ({}, {"capabilities": []}, "the capabilities of stack:.* in disaggregated differs"),
        ({}, {"topology": Topology(engines=4)}, "the shape of disaggregated differs"),
    ],
)  # fmt: skip
def test_shards_of_different_runs_are_refused_by_what_differs(tmp_path, out, info, about, says):
    shards = shard(tmp_path / "a", A, about=HEADER), shard(tmp_path / "b", B, about=HEADER | about, **info)
    with pytest.raises(UsageError, match=says) as caught:
        merged(out, *shards)
    assert caught.value.next_step
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda run: half(next((run / "recordings").iterdir())), RecordingError, "cut off"),
        (lambda run: half(run / "reference.jsonl"), RecordingError, "cut off"),
        (lambda run: RunFolder(run).write_info(recordings.info(outcome="running")), RecordingError, "or was killed"),
        (lambda run: RunFolder(run).write_info(recordings.info(outcome="interrupted")), RecordingError, "ended early"),
        (lambda run: (run / "run.json").unlink(), UsageError, "is not the folder of a run"),
        (
            lambda run: (run / "recordings" / "stack_new@disaggregated.jsonl").unlink(),
            RecordingError,
            f"selected {B} on",
        ),
        (lambda run: answer(run, -0.5, -1.6), RecordingError, "answer next:.* differently"),
        (lambda run: answer(run, -0.5, -1.5, model="another"), RecordingError, "different models"),
    ],
    ids=["recording", "book", "running", "interrupted", "no run", "lost recording", "other answers", "other model"],
)
def test_a_shard_that_is_not_whole_is_refused_and_nothing_is_left(tmp_path, out, damage, error, says):
    a, b = shard(tmp_path / "a", A), shard(tmp_path / "b", B)
    answer(a, -0.5, -1.5)
    damage(b)
    with pytest.raises(error, match=says) as caught:
        merged(out, a, b)
    assert caught.value.next_step
    assert not out.parent.exists() or not list(out.parent.iterdir())


@pytest.mark.parametrize("lacking", [True, False], ids=["it lacks the ability", "it was left out"])
def test_a_scenario_without_a_recording_is_refused_unless_the_stack_lacks_the_ability(
    tmp_path, out, ledger, declared, lacking
):
    a, b = shard(tmp_path / "a", A), shard(tmp_path / "b", B)
    declared["module.test_c"] = recordings.declared("module.test_c", needs=frozenset({Capability.SLEEP}))
    able = [Capability.HEALTH] if lacking else [Capability.SLEEP]
    fields = {"selected": {"lora": ["module.test_c"]}, "declared": {OLD: able, NEW: able}}
    RunFolder(b).write_info(recordings.info(**fields))
    if lacking:
        assert merged(out, a, b, ledger=ledger).verdicts
    else:
        with pytest.raises(RecordingError, match=f"selected module.test_c on {OLD}@lora and did not record it"):
            merged(out, a, b, ledger=ledger)


@pytest.mark.parametrize("names", [[A, A], [A, "the same folder"]])
def test_a_scenario_that_two_shards_drove_on_one_seat_is_refused(tmp_path, out, names):
    a = shard(tmp_path / "a", A)
    b = shard(tmp_path / "b", names[1]) if names[1] == A else a
    with pytest.raises(UsageError, match=rf"{A} was driven on {OLD}@disaggregated|{A} was driven on {NEW}@"):
        merged(out, a, b)
    assert not out.exists()


def test_a_merge_that_cannot_be_judged_leaves_nothing(tmp_path, out, ledger):
    ledger.write_text("[[divergence]]")
    with pytest.raises(HarnessError):
        merged(out, shard(tmp_path / "a", A), shard(tmp_path / "b", B), ledger=ledger)
    assert not list(out.parent.iterdir())


def test_what_is_there_is_never_overwritten(tmp_path, out):
    out.mkdir(parents=True)
    (out / "notes.txt").touch()
    with pytest.raises(UsageError, match="is not empty"):
        merged(out, shard(tmp_path / "a", A))
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
