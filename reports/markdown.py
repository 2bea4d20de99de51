"""report.md, for a pull-request comment: short, without images, below GitHub's limit, and without side effects. Text from
outside can neither mention a user, nor refer to an issue, nor open a tag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from harness.judging.ledger import Ledger
from harness.records.differing import around_the_difference
from harness.records.verdict import Judgement, LedgerProblem, Verdict
from harness.suite.coverage import State
from harness.suite.plan import Plan
from reports import reproduce, view
from reports.tables import CHANGED, EXPOSED, GAPS, NOISE, Column, cells
from reports.text import exact, many, one_line, shortened

LIMIT = 60_000
"""Most characters of report.md. GitHub refuses comments above 65,536."""
ROOM_FOR_THE_END = 1_500
_SPECIAL = re.compile(r"[\\`*\[\]<>&|~!$]|(?<!\w)_|_(?!\w)")
_LINKING = re.compile(r"(?<=[@#])|(?<=\bwww)|(?<=\w)(?=://)|(?<=\bGH)(?=-)")
"""Places where GitHub turns plain text into a mention, a reference or a link. A comment in between keeps it text."""
_STATE = {State.PASS: "✅", State.RED: "❌", State.UNTESTABLE: "❔", State.MISSING: "⛔", State.KNOWN: "📒"}


def render(judgement: Judgement, plan: Plan, ledger: Ledger) -> str:
    """The text of report.md, below `LIMIT`. It counts the blocks that do not fit and refers to report.html."""
    found = view.divergences(judgement)
    end = _end(judgement)
    blocks = [
        _gate(judgement),
        _table(judgement, plan),
        *_security(judgement),
        *_fields(judgement),
        *_changes(judgement),
        *_training(judgement),
    ]
    used = sum(map(len, blocks)) + len(end) + ROOM_FOR_THE_END
    red = [d for d in found if d.red]
    if red or judgement.ledger_problems:
        causes = sum(not d.below for d in red)
        blocks.append(f"### Red: {many(view.count(judgement).red, 'verdict')}, {many(causes, 'cause')}\n")
    blocks += _fitting([*map(_problem, judgement.ledger_problems), *(_divergence(d, judgement) for d in red)], used)
    used = sum(map(len, blocks)) + len(end) + ROOM_FOR_THE_END
    known = [d for d in found if not d.red and d.known]
    counted = view.known_ids(judgement)
    if counted:
        total = f"{many(sum(counted.values()), 'verdict')} under {', '.join(map(text, counted))}"
        blocks.append(f"<details><summary>Known divergences: {total}</summary>\n")
        lines = [_known(name, times, ledger) for name, times in counted.items()]
        blocks += _fitting([*lines, *(_divergence(d, judgement) for d in known)], used)
        blocks.append("</details>\n")
    return "\n".join([*blocks, end])


def text(value: str) -> str:
    """Text from outside as plain text: no markup, no mention, no link, on one line."""
    flat = one_line(value)
    parts = _LINKING.split(flat)
    return "<!-- -->".join(_SPECIAL.sub(lambda found: f"&#{ord(found[0])};", part) for part in parts)


def fenced(value: str, language: str = "") -> str:
    """A code block whose fence is longer than any in it."""
    ticks = max((len(run) for run in re.findall(r"`+", value)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}{language}\n{value}\n{fence}\n"


def _fitting(blocks: Sequence[str], used: int) -> list[str]:
    """The blocks that fit, and a line with the number of the others."""
    kept: list[str] = []
    for block in blocks:
        used += len(block) + 1
        if used > LIMIT:
            return [*kept, f"_… and {len(blocks) - len(kept)} more in report.html._\n"]
        kept.append(block)
    return kept


def _gate(judgement: Judgement) -> str:
    run, counts, gate = judgement.run, view.count(judgement), judgement.gate
    answer = "**Yes**" if gate and gate.may_replace else "**No**"
    status = "✅ green" if judgement.exit_status == 0 else "❌ red"
    stacks = view.stacks_of(run, mark="`")
    lines = [
        "## Rollout parity\n",
        f"{status} · {stacks} · start {text(run.start)} · engine {text(run.computed)} · "
        f"{counts.verdicts} verdicts, **{counts.red} red**, {counts.known} known\n",
    ]
    lines += [f"{text(said)}.\n" for said in view.earlier(judgement)]
    lines += [f"{text(said)}.\n" for said in view.source_trees(judgement)]
    if not judgement.verdicts:
        lines.append("**Nothing was judged.** That is red.\n")
    if run.outcome != "completed":
        lines.append(f"**The run did not complete:** {text(run.outcome)}\n")
    for where, error in run.not_started.items():
        lines.append(f"**{text(where)} did not start:** {text(shortened(f'{error.kind}: {error.message}', 600))}\n")
    reasons = gate.reasons if gate else ["the gate was not asked"]
    lines += [f"{text(gate.means)}.\n"] if gate and gate.means else []
    lines.append(f"{text(view.question(judgement))} {answer}" + (", because:\n" if reasons else ".\n"))
    lines += [f"- {text(shortened(reason, 400))}" for reason in reasons[:8]]
    if len(reasons) > 8:
        lines.append(f"- _… and {len(reasons) - 8} more in report.html_")
    return "\n".join(lines) + "\n"


def _table(judgement: Judgement, plan: Plan) -> str:
    across, rows = view.task_rows(judgement, plan)
    if not across:
        return ""
    head = ["Task", *(("parity " if column.baseline else "") + text(column.name) for column in across)]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in (row for row in rows if row.exercised):
        cells = [f"{_STATE.get(c.state, '▫️')} {view.tally(c.verdicts) or 'not exercised'}" for c in row.cells]
        lines.append("| " + " | ".join([f"{row.task.number} {text(row.task.title)}", *cells]) + " |")
    bare = [str(row.task.number) for row in rows if not row.exercised]
    if bare:
        lines.append(f"\nNot exercised: tasks {', '.join(bare)}.")
    return "\n".join(lines) + "\n"


def _problem(problem: LedgerProblem) -> str:
    what = text(shortened(problem.problem, 600))
    return f"- ledger entry {text(problem.entry)}: {what} — {text(problem.next_step)}\n"


def _known(name: str, times: int, ledger: Ledger) -> str:
    entry = ledger.get(name)
    if entry is None:
        return f"- {text(name)}: {many(times, 'verdict')}\n"
    limits = f"cap {entry.cap}, until {entry.expires}"
    return f"- **{text(name)}**: {many(times, 'verdict')} ({limits}) — {text(entry.sources)}\n"


def _divergence(divergence: view.Divergence, judgement: Judgement) -> str:
    cause, first = divergence.cause, divergence.first
    where = f"{first.scenario} @ {first.topology}"
    more = f" and {len(divergence.instances) - 1} more" if len(divergence.instances) > 1 else ""
    if divergence.below:
        what = f"**{text(divergence.check)}** {text(divergence.status)}: {text(shortened(divergence.reason, 300))}"
        return f"- because of {text(first.because or '')}: {what} (in {text(where)}{more})\n"
    lines = [
        f"#### {text(divergence.status)} · {text(divergence.check)}\n",
        f"{text(shortened(divergence.reason, 600)) or '_no reason given_'}\n",
        f"- seen in: {text(where)}{more}",
        f"- promise: {text(cause.promise)}",
        f"- source: {text(cause.source)}",
    ]
    if divergence.explains:
        lines.append(f"- explains {text(view.explained(divergence))}")
    if cause.blame:
        lines.append(f"- blame: {cause.blame}")
    if divergence.known:
        lines.append(f"- ledger: {text(divergence.known)}")
    if cause.next_step:
        lines.append(f"- next: {text(cause.next_step)}")
    lines += [""] + [_side(v.target, v.status, v.reason) for v in first.stacks if v is not None]
    evidence = "\n".join(_evidence(v for v in first.verdicts if v.baseline is None or first.tells(v)))
    if evidence:
        lines += ["", fenced(shortened(evidence, 1_600))]
    lines.append(fenced(reproduce.command(first.head, judgement.run), "sh"))
    return "\n".join(lines)


def _side(target: str, status: str, reason: str) -> str:
    return f"- {text(target)}: **{text(status)}**" + (f" — {text(shortened(reason, 300))}" if reason else "")


def _evidence(verdicts: Iterable[Verdict]) -> Iterable[str]:
    """The smallest input and both sides: the first piece of evidence of each verdict."""
    for verdict in verdicts:
        for item in verdict.evidence[:1]:
            yield "compared:" if verdict.baseline else f"{one_line(verdict.target)}:"
            yield from (
                f"  {one_line(str(key))}: {shortened(exact(value))}"
                for key, value in around_the_difference(item).items()
            )


def _changes(judgement: Judgement) -> Iterable[str]:
    """A table of what a caller of the client has to change, and what of it nobody called; nothing if nothing."""
    found = view.changes(judgement)
    for said in view.changed(judgement) if found else ():
        lines = [f"<details><summary>{text(said)}</summary>\n", *_rows(CHANGED[:-1], found)]
        yield "\n".join([*lines, "", "</details>\n"])
    yield from (f"{text(said)}\n" for said in view.never_called(judgement))


def _fields(judgement: Judgement) -> Iterable[str]:
    """What became of the fields of requests, a line for each stack. The table is in report.html."""
    yield from (
        f"{one_line(name)}, fields of requests and forms of arguments: {said}.\n"
        for name, said in view.effect_counts(judgement).items()
    )


def _security(judgement: Judgement) -> Iterable[str]:
    """A table of what is open without credentials; nothing if nothing is open."""
    found = view.exposures(judgement)
    if not found:
        return
    lines = [f"<details><summary>Open without credentials: {view.severities(judgement)}</summary>\n"]
    lines += _rows(EXPOSED, found)
    yield "\n".join([*lines, "", "</details>\n"])


def _rows(columns: Sequence[Column], rows: Iterable[Any]) -> Iterable[str]:
    """A table's lines."""
    yield f"| {' | '.join(column.head for column in columns)} |"
    yield "| --- " * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(text(shortened(cell, 600)) for cell in cells(columns, row))} |"


def _training(judgement: Judgement) -> Iterable[str]:
    """Trainer and inference: one table per scenario that trained."""
    for (scenario, topology), curves in view.trainings(judgement).items():
        where = f"{text(scenario)} @ {text(topology)}"
        lines = [f"<details><summary>Trainer against rollouts: {where}, nats, {view.bounds(curves)}</summary>\n"]
        lines += _rows(GAPS, view.gap_rows(curves))
        yield "\n".join([*lines, "", "</details>\n"])


def _end(judgement: Judgement) -> str:
    lines = [f"{repeated}.\n"] if (repeated := view.repetition(view.count(judgement))) else []
    told = (
        *view.held_entries(judgement),
        *view.open_causes(judgement),
        *view.given_way(judgement),
        *view.left_out(judgement),
    )
    lines += [f"{text(said)}.\n" for said in told]
    lines += _rows(NOISE, judgement.noise) if judgement.noise else []
    lines.append("")
    return "\n".join([*lines, fenced(one_line(judgement.run.command), "sh")])
