"""Whether the candidate may replace the baseline, with every objection, worst first. Pure.

Each rule yields objections. The profile of the step (``scenarios/profiles.toml``) says which of them stand; the others are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from harness.judging.census import CENSUS
from harness.judging.ledger import Ledger
from harness.machine.targets import real_stacks
from harness.records.verdict import UNEXPLAINED, Cause, Concession, Conformance, Gate, How, Judgement, Parity, Verdict
from harness.suite.concessions import EVERY_STACK
from harness.suite.coverage import Column, State, cell
from harness.suite.plan import Bullet, Plan, Task
from harness.suite.profiles import Profile

_WORST_FIRST = (Parity.REGRESSION, Parity.BOTH_WRONG, Conformance.FAIL, Parity.MISSING, Conformance.UNTESTABLE)


def decide(judgement: Judgement, plan: Plan, ledger: Ledger, profile: Profile, since: str = "") -> Gate:
    """The answer under a profile, from verdicts to which the ledger has been applied. `since` says why this profile was taken.

    Under every profile, yes requires a completed run of both stacks as shipped (start "ray"), evidence for what the baseline
    offers, nothing red on the candidate alone, nothing missing or untestable, a sound ledger, and no known divergence that blocks.
    """
    new, old = (judgement.verdicts, []) if profile.baseline_faults else _split(judgement)
    needless = _needless(judgement, profile)
    rules: list[tuple[bool, Iterable[str]]] = [
        (True, _run(judgement)),
        (True, _red(new)),
        (profile.baseline_faults, [*_red(old), *_known_to_both(old)]),
        (True, (f"ledger entry {p.entry}: {p.problem}" for p in judgement.ledger_problems)),
        (True, _open(judgement, explained=False)),
        (profile.unnamed_differences, _open(judgement, explained=True)),
        (profile.client_changes, _client_changes(judgement)),
        (True, _known(new, ledger)),
        (True, _start(judgement)),
        (True, _given_way(judgement, shared=False)),
        (profile.shared_concessions, _given_way(judgement, shared=True)),
        (True, _unproven(judgement, plan, profile, needless)),
    ]
    reasons = list(dict.fromkeys(said for stands, found in rules if stands for said in found))
    baseline, candidate = judgement.run.baseline or "another", judgement.run.candidate or "one stack"
    about = profile.about.format(baseline=baseline, candidate=candidate)
    means = f"Yes means: {about}" + (f". Profile {profile.name}: {since}" if since else "")
    return Gate(
        question=f"May {candidate} replace {baseline}? (profile {profile.name})",
        may_replace=not reasons,
        profile=profile.name,
        means=means if judgement.run.baseline and judgement.run.candidate else "",
        reasons=reasons,
        aside=list(dict.fromkeys(said for stands, found in rules if not stands for said in found)),
        left_out=[*_left_out(plan, needless)],
        needless="neither stack offers" if profile.whole_plan else f"{baseline} does not offer",
    )


def _split(judgement: Judgement) -> tuple[list[Verdict], list[Verdict]]:
    """Verdicts on the step, and faults of the baseline: its own, and those that the candidate shares for the same reasons.

    A reason that only the candidate gives makes a shared fault a regression with the candidate's new reasons.
    """
    run = judgement.run
    own = {(*_place(v), v.target): v for v in judgement.verdicts if v.baseline is None and v.status == Conformance.FAIL}
    new: list[Verdict] = []
    old: list[Verdict] = []
    for verdict in judgement.verdicts:
        ours, theirs = (own.get((*_place(verdict), target or "")) for target in (run.baseline, run.candidate))
        if ours is not None and verdict is ours:
            old.append(verdict)
        elif ours is None or theirs is None or not (verdict is theirs or verdict.status == Parity.BOTH_WRONG):
            new.append(verdict)
        elif added := [reason for reason in theirs.each_reason if reason not in ours.each_reason]:
            worse = _only(theirs, added)
            new.append(worse if verdict is theirs else _worse(verdict, worse))
        else:
            old.append(verdict)
    return new, old


def _only(verdict: Verdict, reasons: list[str]) -> Verdict:
    """The verdict with some of its reasons. It is known if each of these is explained."""
    if reasons == verdict.each_reason:
        return verdict
    entries = [verdict.explained.get(reason) for reason in reasons]
    known = entries[0] if None not in entries else None
    return msgspec.structs.replace(verdict, reason="; ".join(reasons), reasons=reasons, known=known)


def _worse(verdict: Verdict, candidate: Verdict) -> Verdict:
    return msgspec.structs.replace(
        verdict,
        status=Parity.REGRESSION,
        reason=candidate.reason,
        reasons=candidate.reasons,
        known=candidate.known,
        explained=candidate.explained,
    )


def _run(judgement: Judgement) -> Iterable[str]:
    run = judgement.run
    if run.outcome != "completed":
        yield f"the run did not complete: {run.outcome}"
    for where, error in run.not_started.items():
        yield f"{where} did not start: {error.kind}: {error.message}"
    if not judgement.verdicts:
        yield "nothing was judged"
    if not (run.baseline and run.candidate):
        yield "no comparison: a baseline and a candidate have to be run"


def _start(judgement: Judgement) -> Iterable[str]:
    if judgement.run.start != "ray":
        yield f"started by {judgement.run.start}: only a run with --start ray drives the stacks as SkyRL ships them"


def _open(judgement: Judgement, *, explained: bool) -> Iterable[str]:
    """Open differences without an entry: those whose cause the recordings tell, or those without a cause."""
    for one in judgement.open_causes:
        if not one.source and (one.cause != UNEXPLAINED) == explained:
            count = f"{one.verdicts} verdict{'s' * (one.verdicts != 1)}"
            known = "no cause explains an open difference" if one.cause == UNEXPLAINED else f"no entry for {one.cause}"
            yield f"{known}: {count} of {one.pair}, first in {one.scenarios[0]}"


def _client_changes(judgement: Judgement) -> Iterable[str]:
    """What a caller has to change, by kind; an objection too if the two clients were not compared."""
    found = [v for v in judgement.verdicts if v.check == CENSUS and v.baseline is not None]
    if not found and judgement.run.baseline and judgement.run.candidate:
        yield "the clients were not compared: no scenario with a census was driven on both stacks"
    names: dict[str, dict[str, None]] = {}
    for change in (change for verdict in found for change in verdict.changes):
        if change.how is not How.NEW:
            names.setdefault(change.how, {})[change.name] = None
    for how, changed in names.items():
        yield f"a caller has to change {len(changed)} ({how}): {', '.join(changed)}"


def _given_way(judgement: Judgement, *, shared: bool) -> Iterable[str]:
    """Concessions that can hide a difference: those to both stacks, or those to one of them."""
    hiding = [one for one in judgement.concessions if one.hides and _to_both(one, judgement) == shared]
    if hiding:
        whom = "both stacks" if shared else "one of the stacks"
        can = f"{len(hiding)} of {len(judgement.concessions)} concessions can hide a difference and are made to {whom}"
        yield f"{can}: `parity concessions` lists them"


def _to_both(concession: Concession, judgement: Judgement) -> bool:
    baseline, candidate = judgement.run.baseline, judgement.run.candidate
    if not (baseline and candidate):
        return False
    sides = [real_stacks([target], judgement.released) for target in (baseline, candidate)]
    return EVERY_STACK in concession.stacks or all(side & set(concession.stacks) for side in sides)


def _red(verdicts: Sequence[Verdict]) -> Iterable[str]:
    """One reason per status, check and cause; consequences last. A comparison stands for the stack's own verdict that made it
    red."""
    own = {(*_place(v), v.target): v for v in verdicts if v.baseline is None}
    spoken_for = {_place(v) for v in verdicts if v.red and v.baseline is not None}
    causes: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in (v for v in verdicts if v.red):
        reason, check = verdict.reason, verdict.check
        if verdict.baseline is not None:
            sides = [own.get((*_place(verdict), target)) for target in (verdict.target, verdict.baseline)]
            reason = next((side.reason for side in sides if side is not None and side.status != "pass"), reason)
        elif _place(verdict) in spoken_for:
            continue
        else:
            check += f" on {verdict.target}"
        causes.setdefault((verdict.status, check, reason), []).append(verdict)
    order = [str(status) for status in _WORST_FIRST]
    for (status, check, reason), group in sorted(
        causes.items(),
        key=lambda item: (all(v.because for v in item[1]), order.index(item[0][0]), -len(item[1]), item[0]),
    ):
        yield f"{status}: {check}{_where(group)}" + (f": {reason}" if reason else "")


def _place(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.scenario, verdict.topology, verdict.check


def _where(group: Sequence[Verdict]) -> str:
    scenarios = sorted({v.scenario for v in group})
    return f" in {scenarios[0]}" if len(scenarios) == 1 else f" in {len(scenarios)} scenarios ({scenarios[0]}, …)"


def _known(verdicts: Sequence[Verdict], ledger: Ledger) -> Iterable[str]:
    """Known divergences in which the candidate is worse than the baseline. Each blocks unless its entry says otherwise."""
    both_wrong = {_place(v) for v in verdicts if v.status == Parity.BOTH_WRONG}
    baselines = {v.baseline for v in verdicts if v.baseline}
    causes: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        entry = ledger.get(verdict.known)
        if verdict.known is None or (entry is not None and not entry.blocks):
            continue
        own_fault = (
            verdict.status == Conformance.FAIL
            and verdict.baseline is None
            and verdict.target not in baselines
            and _place(verdict) not in both_wrong
        )
        if own_fault or verdict.status in (Parity.REGRESSION, Parity.MISSING, Conformance.UNTESTABLE):
            causes.setdefault(verdict.known, []).append(verdict)
    for name, group in causes.items():
        many = "1 verdict" if len(group) == 1 else f"{len(group)} verdicts"
        yield f"known divergence {name} still stands ({many}): {group[0].check}: {group[0].reason}"


def _known_to_both(old: Sequence[Verdict]) -> Iterable[str]:
    counts: dict[str, int] = {}
    for verdict in old:
        if verdict.known is not None:
            counts[verdict.known] = counts.get(verdict.known, 0) + 1
    for name, count in counts.items():
        yield f"known divergence {name} ({count} verdict{'s' * (count != 1)}): the baseline has it too"


def _unproven(judgement: Judgement, plan: Plan, profile: Profile, needless: AbstractSet[str]) -> Iterable[str]:
    """Bullets without evidence, task by task. Tasks without evidence for any bullet are listed together, with their waves."""
    engine = judgement.run.engine
    untouched: list[Task] = []
    for task in plan.task:
        due = [bullet for bullet in task.bullet if profile.whole_plan or not _is_needless(bullet, needless)]
        bare = [bullet.id for bullet in due if not _evident(bullet, judgement, needless)]
        if due and len(bare) == len(task.bullet):
            untouched.append(task)
        elif bare:
            yield f"task {task.number}: no evidence for {', '.join(bare)}"
        weak = [b.id for b in due if b.id not in bare and b.engine not in ("any", engine)]
        if weak:
            yield f"task {task.number}: {', '.join(weak)} can only be shown on CUDA; this run used {engine}"
    if untouched:
        waves = sorted({task.wave for task in untouched})
        yield (
            f"task {_ranges([task.number for task in untouched])}: no bullet has all of its evidence (wave {_ranges(waves)})"
        )


def _is_needless(bullet: Bullet, needless: AbstractSet[str]) -> bool:
    """True if it names scenarios and all of them are needless."""
    return bool(bullet.scenarios) and {name.partition("@")[0] for name in bullet.scenarios} <= needless


def _evident(bullet: Bullet, judgement: Judgement, needless: AbstractSet[str]) -> bool:
    """True if every scenario of the bullet, needless ones aside, was judged on the candidate and compared with the baseline."""
    run = judgement.run
    if not (run.candidate and run.baseline):
        return False
    left = [name for name in bullet.scenarios if name.partition("@")[0] not in needless]
    if not left:
        return False
    bullet = msgspec.structs.replace(bullet, scenarios=left)
    judged = [v for v in judgement.verdicts if v.status not in (Conformance.MISSING, Conformance.UNTESTABLE)]
    stack, pair = Column(target=run.candidate), Column(target=run.candidate, baseline=run.baseline)
    return all(
        found.state is not State.NOT_EXERCISED and not found.unexercised
        for found in (cell(bullet, stack, judged), cell(bullet, pair, judged))
    )


def _left_out(plan: Plan, needless: AbstractSet[str]) -> Iterable[str]:
    for bullet in plan.bullets:
        if lacking := [name for name in bullet.scenarios if name.partition("@")[0] in needless]:
            yield f"{bullet.id} without {', '.join(lacking)}"


def _needless(judgement: Judgement, profile: Profile) -> set[str]:
    """The scenarios that need no evidence: the baseline does not offer them, and with the whole plan the candidate neither."""
    run = judgement.run
    if not (run.candidate and run.baseline):
        return set()
    lacking = _not_offered(judgement, run.baseline)
    return lacking & _not_offered(judgement, run.candidate) if profile.whole_plan else lacking


def _not_offered(judgement: Judgement, target: str) -> set[str]:
    """The scenarios that a target does not offer anywhere. What only this start cannot show is offered."""
    asked = [v for v in judgement.verdicts if v.target == target and v.baseline is None]
    absent = {v.id for v in asked if v.status == Conformance.MISSING and v.cause != Cause.NOT_HERE}
    return {v.scenario for v in asked} - {v.scenario for v in asked if v.id not in absent}


def _ranges(numbers: Sequence[int]) -> str:
    """[4, 5, 6, 9] → "4–6, 9"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
