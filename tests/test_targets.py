"""A target's name resolves to an adapter and a place to run it, or gives one clear error message."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import msgspec
import pytest

from harness.contract.errors import EnvironmentBroken, UsageError
from harness.machine import targets
from harness.machine.environments import requirement_file
from harness.machine.installed import pins
from harness.machine.targets import (
    HOST_NEEDS,
    Router,
    Step,
    described,
    known,
    of_local,
    registry,
    released,
    resolve,
    step,
    with_router,
)


def test_every_target_has_an_environment_that_can_be_made_or_asks_for_an_interpreter():
    for target in registry().values():
        assert target.local == target.name.startswith("local:")
        if target.environment is not None:
            assert requirement_file(target.environment, "cpu").is_file()
            assert requirement_file(target.environment, "cuda").is_file()


def test_a_local_target_is_its_release_without_the_environment():
    for kind, switch in (("legacy", "0"), ("http", "1")):
        local, release = registry()[f"local:{kind}"], registry()[f"skyrl-0.2.0:{kind}"]
        assert (local.adapter, local.capabilities) == (release.adapter, release.capabilities)
        assert local.variables == release.variables == {"_SKYRL_USE_NEW_INFERENCE": switch}


@pytest.mark.parametrize(
    ("version", "release"), [("0.2.0", "0.2.0"), ("0.3.1", "0.3.0"), ("9.9", "0.4.0"), ("", "0.4.0"), (None, "0.4.0")]
)
def test_a_local_target_has_the_capabilities_of_the_release_in_its_interpreter(tmp_path, version, release):
    for module in registry()["local:http"].runs_on.modules:
        (tmp_path / f"{module}.py").write_text("print('loading')\n")
    if version is not None:
        (tmp_path / "skyrl-1.dist-info").mkdir()
        (tmp_path / "skyrl-1.dist-info" / "METADATA").write_text(f"Name: skyrl\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    local = resolve("local:http", {"": python})
    assert local.capabilities == registry()[f"skyrl-{release}:http"].capabilities


def test_a_release_is_what_the_targets_lock_pins():
    stated = {target.environment: target.release for target in registry().values() if target.release}
    assert len(stated) == 4
    for environment, release in stated.items():
        package, version = release.split("==")
        assert {pins(requirement_file(environment, engine))[package] for engine in ("cpu", "cuda")} == {version}


def test_a_stack_under_another_name_is_the_release_that_its_recordings_name():
    def of(name: str, *versions: str) -> str | None:
        return released((name, {"skyrl": version, "vllm": "1"}) for version in versions).get(name, "left out")

    assert of("local:http", "0.2.0") == of("skyrl-0.2.0:http in run", "0.2.0") == "skyrl-0.2.0:http"
    assert of("local:legacy", "0.1.0", "0.1.0") == "skyrl-0.1.0:legacy"
    assert of("local:http", "0.3.0") == of("local:http#mine", "0.3.0") == "skyrl-0.3.0:http", "needs fewer variables"
    for unreleased in (("0.2.0.dev3",), ("0.2.0+mine",), ("9.9",), ("0.1.0", "0.2.0")):
        assert of("local:http", *unreleased) is None
    assert released([("local:http", {"vllm": "1"})]) == {"local:http": None}
    for other in ("skyrl-0.2.0:http", "miniature", "miniature in run", "unheard of"):
        assert of(other, "0.2.0") == "left out"


@pytest.mark.parametrize("name", list(registry()))
def test_the_adapter_of_a_target_is_there(name):
    module, _, adapter = registry()[name].adapter.partition(":")
    assert callable(getattr(importlib.import_module(module), adapter).start)


def test_what_is_like_another_takes_all_but_its_environment_unless_it_names_its_own(tmp_path):
    rows = [
        'about = ""',
        'adapter = "a:A"',
        'environment = "first"',
        'release = "one==1"',
        "capabilities = []",
        'variables = { A = "1" }',
    ]
    (tmp_path / "targets.toml").write_text(
        "\n".join(["[targets.first]", *rows, "[targets.local]", 'like = "first"'])
        + '\n[targets.next]\nlike = "first"\nenvironment = "next"\nvariables = { A = "2" }\n'
    )
    found = registry(tmp_path / "targets.toml")
    assert [found[name].environment for name in ("first", "local", "next")] == ["first", None, "next"]
    assert [found[name].release for name in ("first", "local", "next")] == ["one==1", None, None]
    assert [found[name].variables["A"] for name in ("first", "local", "next")] == ["1", "1", "2"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("skyrl-0.2.0:htp", "did you mean skyrl-0.2.0:http"),
        ("", "known are"),
        ("verl", "known are skyrl-0.2.0:legacy,"),
    ],
)
def test_an_unknown_target_is_answered_with_close_names(name: str, said: str):
    with pytest.raises(UsageError, match=said):
        resolve(name)


def test_an_interpreter_is_only_for_local_targets_and_they_need_one():
    assert resolve("skyrl-0.2.0:http", {"": Path("/nowhere")}).python is None
    with pytest.raises(UsageError, match="needs your own checkout, or the interpreter"):
        resolve("local:http")


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A link to a script that is this Python with empty modules of the stack's names."""
    for name in (*known("local:http").runs_on.modules, *HOST_NEEDS):
        (tmp_path / f"{name}.py").touch()
    script = tmp_path / "python-with-stack"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(script)
    return link


def test_a_local_target_runs_the_named_interpreter_as_it_was_named(interpreter: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(interpreter.parent)
    assert resolve("local:legacy", {"": Path("link").absolute()}).python == interpreter, (
        "a virtual environment's link must stay a link"
    )


def test_local_targets_of_a_kind_are_told_apart_by_labels(interpreter: Path, tmp_path: Path):
    old, new = resolve("local:http#old", {"": interpreter}), resolve("local:http#new+1f", {"": interpreter})
    assert (old.name, new.name, old.adapter) == ("local:http#old", "local:http#new+1f", new.adapter)
    assert of_local("--python", [f"local:http#old={tmp_path}"]) == {"local:http#old": tmp_path}
    own = {"local:http": tmp_path / "none", "local:http#new": interpreter}
    assert resolve("local:http#new", own).python == interpreter, "its own before that of its kind"
    with pytest.raises(UsageError, match="only local targets have labels"):
        known("skyrl-0.2.0:http#old")
    for unreadable in ("local:http#", "local:http#a@b", "local:htp#old"):
        with pytest.raises(UsageError, match="unknown target"):
            known(unreadable)


def test_a_name_may_ask_for_another_router_with_all_else_as_it_was(interpreter: Path):
    plain = known("skyrl-0.4.0:http")
    for label, version, policy in (
        ("vllm-router-0.1.13", "0.1.13", None),
        ("vllm-router-round_robin", None, "round_robin"),
        ("vllm-router-0.1.13-power_of_two", "0.1.13", "power_of_two"),
    ):
        name = f"skyrl-0.4.0:http#{label}"
        other = known(name)
        assert other.other_router == Router(package="vllm-router", version=version, policy=policy)
        assert msgspec.structs.replace(other, name=plain.name, other_router=None) == plain
        assert with_router(plain.name, version and f"vllm-router=={version}", policy) == name
    both = resolve("local:http#old#vllm-router-0.1.13", {"local:http#old": interpreter})
    assert (both.python, both.other_router) == (interpreter, Router(package="vllm-router", version="0.1.13"))


def test_a_release_with_another_router_is_still_that_release_to_the_ledger_and_the_profile():
    name, versions = "skyrl-0.2.0:http#vllm-router-0.1.13", {"skyrl": "0.2.0"}
    assert released([(name, versions)]) == {name: "skyrl-0.2.0:http"}
    assert step("skyrl-0.2.0:http", name, {name: versions}) == Step.SAME


@pytest.mark.parametrize(
    ("name", "version", "policy", "said"),
    [
        (
            "skyrl-0.2.0:legacy",
            "vllm-router==0.1.13",
            None,
            "skyrl-0.2.0:legacy has no router that is a package of its own",
        ),
        ("skyrl-0.1.0:http", None, "random", "skyrl-0.1.0:http has no router that is a package of its own"),
        ("skyrl-0.4.0:http", "0.1.13", None, "the router of skyrl-0.4.0:http is vllm-router"),
        ("skyrl-0.4.0:http", "nginx==1.0", None, "the router of skyrl-0.4.0:http is vllm-router"),
        ("skyrl-0.4.0:http", "vllm-router==", None, "the router of skyrl-0.4.0:http is vllm-router"),
        ("skyrl-0.4.0:http", None, "Round-Robin", "is no name of a policy"),
        ("skyrl-0.4.0:http#vllm-router-0.1.13", None, "random", "names its router already"),
    ],
)
def test_a_router_that_cannot_be_had_is_refused_by_name(name: str, version: str | None, policy: str | None, said: str):
    with pytest.raises(UsageError, match=re.escape(said)):
        with_router(name, version, policy)


@pytest.mark.parametrize(
    "name",
    [
        "skyrl-0.2.0:legacy#vllm-router-0.1.13",
        "skyrl-0.4.0:http#vllm-router",
        "skyrl-0.4.0:http#old#vllm-router-0.1.13",
    ],
)
def test_a_label_that_is_no_router_of_the_target_is_refused(name: str):
    with pytest.raises(UsageError, match="only local targets have labels"):
        known(name)


def test_a_version_is_described_by_the_newest_release_before_it():
    def of(version: str) -> list[str]:
        return [row.name for row in described(known("local:http"), version)]

    assert of("0.3.0") == of("0.3.7.dev1") == ["skyrl-0.3.0:http", "skyrl-0.4.0:http"]
    assert of("9.9") == of("0.4.0") == of("unreadable") == ["skyrl-0.4.0:http"]
    assert of("0.0.1") == ["skyrl-0.1.0:http", "skyrl-0.4.0:http"]
    assert [row.name for row in described(known("local:legacy"), "0.3.0")] == ["skyrl-0.2.0:legacy"]


def test_an_interpreter_without_the_stack_is_refused(interpreter: Path):
    (interpreter.parent / "vllm.py").write_text("raise ImportError('libtorch.so: cannot open')\n")
    with pytest.raises(EnvironmentBroken, match="cannot run a stack: ImportError: libtorch") as caught:
        resolve("local:http", {"": interpreter})
    assert "vllm" in caught.value.next_step


def test_an_interpreter_that_hangs_is_given_up(interpreter: Path, monkeypatch: pytest.MonkeyPatch):
    (interpreter.parent / "skyrl.py").write_text("import threading; threading.Event().wait()\n")
    monkeypatch.setattr(targets, "IMPORT_DEADLINE_S", 0.5)
    with pytest.raises(EnvironmentBroken, match="within 0 s"):
        resolve("local:http", {"": interpreter})


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist"):
        resolve("local:http", {"": tmp_path / "python"})
    with pytest.raises(UsageError, match="does not exist"):
        resolve("local:http", {"": tmp_path})
    (tmp_path / "text").write_text("not a program")
    if os.geteuid() != 0:
        (tmp_path / "text").chmod(0o600)
    with pytest.raises(UsageError, match="not executable"):
        resolve("local:http", {"": tmp_path / "text"})
    (tmp_path / "text").chmod(0o700)
    with pytest.raises(UsageError, match="cannot be run"):
        resolve("local:http", {"": tmp_path / "text"})


def test_each_local_target_may_have_an_interpreter_of_its_own(tmp_path: Path):
    found = of_local("--python", [f"local:http={tmp_path}/new", str(tmp_path / "any")])
    assert found == {"local:http": tmp_path / "new", "": tmp_path / "any"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["skyrl-0.2.0:http=/bin/python"], "is no local target"),
        (["nowhere=/bin/python"], "unknown target 'nowhere'"),
        (["/a", "/b"], "--python is given twice for all local targets"),
    ],
)
def test_an_interpreter_for_nothing_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        of_local("--python", given)
