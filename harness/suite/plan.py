"""The rollout plan as data: tasks, their checklist, and which scenarios give evidence for each bullet.

Read from ``scenarios/plan.toml``. `harness/suite/coverage.py` derives what a run shows of it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, final

import msgspec

from harness.contract import topology
from harness.contract.errors import UsageError
from harness.records.verdict import Verdict

SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
RELEASE = re.compile(r"\d+\.\d+\.\d+")
SCENARIO = re.compile(rf"[a-z]\w*\.test_\w+(@({'|'.join(topology.names())}))?")


@final
class Bullet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One promise of a task's checklist."""

    id: str
    """Its place in the plan: "<task>.<position>", such as "1.3"."""
    slug: str
    """The promise's id, such as "results-in-order". It never changes and is in ``scenarios/promises.txt``."""
    level: Literal["must", "should", "may"]
    """As in RFC 2119; the head of ``scenarios/plan.toml`` says what each means here."""
    source: str
    """The public text that promises it."""
    since: str
    """First release of this suite that has it, such as "0.1.0"."""
    text: str
    scenarios: list[str]
    """"module.function" of the scenarios that give evidence; "…@colocated" counts only that topology."""
    engine: Literal["any", "cuda"] = "any"
    """"cuda" if a run without an accelerator exercises the code path but cannot keep the promise."""


@final
class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task of the plan; number 0 is the contract that all others rest on."""

    number: int
    wave: int
    title: str
    bullet: list[Bullet]


@final
class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tasks, in order of their numbers, without a gap."""

    task: list[Task]

    @property
    def bullets(self) -> list[Bullet]:
        return [bullet for task in self.task for bullet in task.bullet]


WITHDRAWN = "  # withdrawn: "
"""In promises.txt, between the id of a promise that left the plan and the reason."""


def published() -> dict[str, str]:
    """The id of each promise that a release of this suite ever had → why it was withdrawn, or "" for one of the plan."""
    lines = (files("scenarios") / "promises.txt").read_text(encoding="utf-8").splitlines()
    found = [line.partition(WITHDRAWN)[::2] for line in lines if not line.startswith("#")]
    if len(dict(found)) < len(found):
        raise UsageError("promises.txt has an id twice", next_step="give the newer promise another id")
    return dict(found)


def counts_for(name: str, verdict: Verdict) -> bool:
    """True if `verdict` is about the scenario that a bullet names, in the topology that it names."""
    scenario, _, where = name.partition("@")
    return verdict.scenario == scenario and where in ("", verdict.topology)


def load_plan(path: Path | None = None) -> Plan:
    """Read a plan; None means the one shipped with the scenarios.

    Raises `UsageError`, naming the task or bullet, for anything but a complete and well-formed plan.
    """
    if path is None:
        with as_file(files("scenarios") / "plan.toml") as shipped:
            return load_plan(shipped)
    try:
        plan = msgspec.convert(_read(path), Plan)
    except msgspec.ValidationError as e:
        raise UsageError(f"{path} is not a plan: {e}", next_step="see scenarios/plan.toml for the format") from e
    _validate(plan, path)
    return plan


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"cannot read the plan {path}: {e.strerror}", next_step="name a file like plan.toml") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not TOML: {e}", next_step="correct that line") from e


def _validate(plan: Plan, path: Path) -> None:
    def wrong(what: str, next_step: str) -> UsageError:
        return UsageError(f"{path}: {what}", next_step=next_step)

    numbers = [task.number for task in plan.task]
    if not numbers or numbers != list(range(len(numbers))):
        raise wrong(f"tasks are numbered {numbers}", "number them 0, 1, 2, … in order; 0 is the contract")
    slugs = [bullet.slug for bullet in plan.bullets]
    if twice := sorted({slug for slug in slugs if slugs.count(slug) > 1}):
        raise wrong(f"several bullets have the slug {', '.join(twice)}", "give each promise an id of its own")
    for task in plan.task:
        if not 1 <= task.wave <= 6:
            raise wrong(f"task {task.number} is in wave {task.wave}", "the plan has waves 1 to 6")
        if not task.title.strip():
            raise wrong(f"task {task.number} has no title", "say what the task is")
        ids = [bullet.id for bullet in task.bullet]
        wanted = [f"{task.number}.{position}" for position in range(1, len(ids) + 1)]
        if not ids or ids != wanted:
            raise wrong(f"task {task.number} has bullets {ids}", f"number them {wanted or ['0.1']} in order")
        for bullet in task.bullet:
            for what, next_step in _faults(bullet):
                raise wrong(f"bullet {bullet.id} {what}", next_step)


def _faults(bullet: Bullet) -> Iterator[tuple[str, str]]:
    """What is wrong with a well-typed bullet: (problem, next step)."""
    if not bullet.text.strip():
        yield "has no text", "say what is promised"
    if not SLUG.fullmatch(bullet.slug):
        yield f"has the slug {bullet.slug!r}", "write words with dashes between"
    if not bullet.source.strip():
        yield "has no source", "name the public text that promises it"
    if not RELEASE.fullmatch(bullet.since):
        yield f"is since {bullet.since!r}", "name a release of this suite, as 0.1.0"
    for name in bullet.scenarios:
        if not SCENARIO.fullmatch(name):
            example = f'write "module.test_function", or with a topology "…@{topology.names()[0]}"'
            yield f"names {name!r}", example
    if len(set(bullet.scenarios)) != len(bullet.scenarios):
        yield "names a scenario twice", "name each once"
