"""The process of another stack: what the host sees of it, with a stack whose only part is a process that listens."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from backends.skyrl import other
from harness.contract import messages
from harness.contract.topology import topology

LISTENS = "import socket, sys, time; one = socket.create_server(('127.0.0.1', 0)); print(flush=True); time.sleep(600)"
WITHIN_S = 30.0


class Stack:
    """Its router is a child of its process, and outlives it. A wrong model shows at the start, after the router has begun."""

    forgets = False
    """True if the end forgets the router."""

    async def prepare(self, request: messages.StartRequest) -> None:
        self.request = request
        self.engine_model = request.model_path
        policy = SimpleNamespace(model=SimpleNamespace(path=request.model_path))
        engine = SimpleNamespace(engine_init_kwargs={})
        self.cfg = SimpleNamespace(
            trainer=SimpleNamespace(policy=policy), generator=SimpleNamespace(inference_engine=engine)
        )

    async def bring_up(self) -> None:
        self._router = subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE)
        assert self._router.stdout is not None
        self._router.stdout.readline()
        if not Path(self.cfg.trainer.policy.model.path, "weights.safetensors").exists():
            raise FileNotFoundError(f"{self.cfg.trainer.policy.model.path} has no weights")
        if refused := self.cfg.generator.inference_engine.engine_init_kwargs:
            raise ValueError(f"{refused} is refused")

    async def generate(self, request: messages.GenerateRequest) -> None:
        assert request.prompt_token_ids

    def roles(self) -> dict[str, int]:
        return {"router": self._router.pid}

    def forked_servers(self) -> list[int]:
        return []

    async def let_go(self) -> None:
        await self.end()

    async def end(self) -> None:
        if not self.forgets:
            self._router.kill()


class Forgetful(Stack):
    """Its end forgets the router."""

    forgets = True


def lived(tmp_path: Path, stack: type, *lives: dict[str, str | None]) -> list[messages.OtherStackResult]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.safetensors").touch()
    (model / "config.json").touch()
    request = messages.StartRequest(
        target="x",
        topology=topology("disaggregated"),
        start="fork",
        model_path=str(model),
        scratch=str(tmp_path),
        logs=str(tmp_path),
    )

    async def drive() -> list[messages.OtherStackResult]:
        owner = other.Owner(request, stack, 1)
        await owner.prepare()
        return [await owner.live(messages.OtherStackRequest(start_s=WITHIN_S, end_s=1.0, **life)) for life in lives]

    return asyncio.run(drive())


def kinds(left: list[messages.Remnant]) -> list[str]:
    """Kinds of what is left, which ends here."""
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(one.what.split()[1].rstrip(":"))).kill()
    return [one.kind for one in left]


WRONG = ["no model", "no weights", "option"]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_start_that_fails_names_its_cause(tmp_path, wrong):
    (found,) = lived(tmp_path, Stack, {"wrong": wrong, "then": "exits"})
    assert found.error is not None
    assert found.names
    assert all(name in found.error for name in found.names)
    assert (found.left, found.outlived) == ([], [])


def test_what_a_failed_start_leaves_is_seen_before_and_after_its_process(tmp_path):
    (found,) = lived(tmp_path, Forgetful, {"wrong": WRONG[0], "then": "exits"})
    assert [one.kind for one in found.left] == ["process"]
    assert kinds(found.outlived) == ["process"]


def test_a_stack_that_ends_and_one_whose_process_is_killed(tmp_path):
    ended, killed = lived(tmp_path, Stack, {}, {"then": "killed"})
    assert [one.kind for one in ended.ran] == ["router"]
    assert (ended.error, ended.end_error, ended.left) == (None, None, [])
    assert kinds(killed.outlived) == ["router"]
