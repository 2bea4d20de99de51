"""A slow start reports the stack's stage from the stack's own logs, and gets the time that its engines need."""

from __future__ import annotations

import asyncio
import io
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.vllm.stages import STAGES
from harness.contract.messages import START_DEADLINE_S, Description, StartRequest
from harness.contract.topology import Topology
from harness.driving import stack as stacks
from harness.driving.stack import Stack
from harness.machine.logs import LatestStage
from harness.machine.progress import console_progress
from harness.machine.targets import registry

LINES = [
    ("INFO [core.py:105] Initializing a V1 LLM engine (v0.19.0) with config: model=…\n", "an engine's process is up"),
    ("(EngineCore pid=7) INFO [gpu_model_runner.py:4736] Starting to load model /m...\n", "loading weights"),
    ("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00]\r", "loading weights, 50%"),
    ("INFO [default_loader.py:384] Loading weights took 0.01 seconds\n", "weights are loaded"),
    ("INFO [backends.py:1052] Using cache directory: /c for vLLM's torch.compile\n", "compiling"),
    ("INFO [loggers.py:9] something else\n", "compiling"),
    ("INFO [monitor.py:35] torch.compile takes 31.20 s in total\n", "compiled"),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  45%|████▌     | 5/11\r", "capturing CUDA graphs, 45%"),
    ("INFO [gpu_model_runner.py:6047] Graph capturing finished in 9 secs, took 0.30 GiB\n", "CUDA graphs are captured"),
    ("INFO [core.py:283] init engine (profile, create kv cache, warmup model) took 60 seconds\n", "an engine is ready"),
]


def test_the_latest_stage_of_a_start_is_read_from_lines_as_they_come(tmp_path: Path):
    stage = LatestStage(tmp_path, STAGES)
    assert not stage()
    with (tmp_path / "infra.log").open("a") as log:
        for line, words in LINES:
            log.write(line[:-1])
            log.flush()
            before = stage()
            log.write(line[-1])
            log.flush()
            assert stage() == words
            assert before != words or words == "compiling", "a line counts once it is whole"


def test_every_log_below_the_folder_counts(tmp_path: Path):
    stage = LatestStage(tmp_path, STAGES)
    (tmp_path / "server-0.log").write_text(LINES[0][0])
    assert stage() == LINES[0][1]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "server-1.log").write_text(LINES[1][0])
    assert stage() == LINES[1][1]


def test_targets_with_engines_tell_their_stages_and_others_none():
    told = {name: bool(target.runs_on.stages) for name, target in registry().items()}
    assert {name for name, tells in told.items() if tells} == {n for n in told if n.partition(":")[0] != "miniature"}


def test_lines_of_a_step_say_how_long_and_how_far():
    out = io.StringIO()
    with console_progress(out)("starting") as say:
        say("loading weights")
        say("")
    assert out.getvalue().splitlines() == [
        "starting …", "starting: 0 s, loading weights", "starting: 0 s", "starting: done in 0 s"
    ]  # fmt: skip


class Slow:
    """A host whose start lasts until progress was reported."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.said, self.deadline_s = logs, asyncio.Event(), 0.0

    async def launch(self) -> None:
        pass

    async def call(self, _method: str, request: Any, deadline_s: float) -> Description:
        self.deadline_s = deadline_s
        (self.logs / "host.log").write_text(LINES[1][0])
        await asyncio.wait_for(self.said.wait(), 10)
        return Description(
            target=request.target, topology=request.topology, start=request.start, capabilities=[], servers=[]
        )


@pytest.mark.asyncio
@pytest.mark.parametrize("engine", ["cpu", "cuda"])
async def test_a_start_tells_its_stage_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any):
    monkeypatch.setattr(stacks, "TELL_EVERY_S", 0.01)
    heard: list[str] = []
    host = Slow(tmp_path)

    @contextmanager
    def progress(_message: str) -> Any:
        yield lambda words: (heard.append(words), host.said.set())

    request = StartRequest(
        target="t", topology=Topology(), engine=engine, model_path="", scratch="", logs=str(tmp_path)
    )
    await Stack(host, request, stages=STAGES).start(progress)  # type: ignore[arg-type]
    assert heard == ["loading weights"]
    await asyncio.sleep(0.05)
    assert heard == ["loading weights"], "nothing more once it is up"
    assert host.deadline_s > START_DEADLINE_S[engine], "the adapter has the first word"
