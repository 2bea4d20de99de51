"""Which model a topology is driven with: the user's where it fits, else a tiny one of its architecture, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import session
from harness.progress import silent
from harness.session import Options, Session
from harness.topology import topology


def checkpoint(folder: Path, architecture: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": architecture}))
    (folder / "model.safetensors").write_bytes(architecture.encode())
    return folder


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names of the models of these topologies in one run, where the user gave `model`; and the tiny ones that were made."""
    made: list[str] = []

    def tiny_model(_python, _progress, architecture):
        made.append(architecture)
        return checkpoint(tmp_path / f"tiny-{architecture}", architecture)

    monkeypatch.setattr(session, "tiny_model", tiny_model)
    monkeypatch.setattr(Session, "_python", lambda *_: Path("python"))

    def choose(*topologies: str, model: str | None = None) -> tuple[list[str], list[str]]:
        given = None if model is None else checkpoint(tmp_path / "given", model)
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
    ("given", "names"),
    [("llama", ["given", "tiny-qwen3_moe"]), ("qwen3_moe", ["given", "given"])],
)
def test_the_users_model_is_taken_wherever_it_fits(chosen, given, names):
    assert chosen("disaggregated", "moe", model=given) == (
        names,
        [n for n in ["qwen3_moe"] if "given" not in names[1:]],
    )
