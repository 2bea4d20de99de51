"""Baseline × candidate (× the baseline's twin) → comparison verdicts, by the architecture's verdict table. Pure.

Conformance comes first. Equal outputs pass only if both sides keep every promise: two sides that break the same promise alike do
not pass. A difference that no check condemns is `open`: shown with both sides, not red. Beside a failed check outputs are compared
as well, without the calls and rows that the check found wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, final

import msgspec

from harness.checks import curves, gaps
from harness.checks.always import ALWAYS
from harness.checks.base import EVERY, Evidence
from harness.checks.training import GAP
from harness.contract.errors import Blame
from harness.contract.messages import CHOICES, METHODS, Plane
from harness.judging import census, effects, engine_facets, headers
from harness.judging.causes import Why
from harness.judging.consequences import with_causes
from harness.judging.facets import ERRORS, LOGPROBS, error_of
from harness.judging.judge import NEXT_STEP
from harness.judging.pairing import Pairing
from harness.judging.sides import Comparison, Facet, covered, lay_side_by_side
from harness.machine.targets import released
from harness.records.recording import ENUMERATED, Call, ScenarioTrace
from harness.records.reference import UnansweredQuery
from harness.records.verdict import UNEXPLAINED, Concern, Conformance, NoiseFloor, Parity, Verdict
from harness.suite.scenario import Scenario

PAIRED = "calls.paired"
"""Facet of the calls themselves: every call of one side has its partner on the other."""
ASKED_OTHERWISE = "asked_otherwise"
"""Number of an enumeration's cases that both sides have and each was asked otherwise, where that leaves next to nothing to compare."""


@final
class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that was driven and judged: `verdicts` may be merged over takes, `evidence` is the compared take."""

    evidence: Evidence
    verdicts: list[Verdict]
    own: list[Verdict] = []
    """Those of the compared take alone."""

    @property
    def broken(self) -> list[str]:
        """Checks that the compared take fails."""
        return sorted({v.check for v in self.own if v.status != Conformance.PASS})

    @property
    def concerns(self) -> frozenset[Concern]:
        """What these checks found wrong."""
        return frozenset(concern for v in self.own if v.status != Conformance.PASS for concern in v.concerns)

    @property
    def refuses(self) -> bool:
        """True if every request of the scenario was refused: an engine has nothing to show."""
        asked = [call for call in self.evidence.calls() if METHODS[call.method].plane is Plane.DATA]
        return bool(asked) and all(call.error is not None for call in asked)

    @property
    def target(self) -> str:
        return self.evidence.trace.header.target

    @property
    def topology(self) -> str:
        return self.evidence.trace.header.topology.name

    @property
    def conforms(self) -> bool:
        return bool(self.verdicts) and all(v.status == Conformance.PASS for v in self.verdicts)

    @property
    def driven(self) -> bool:
        return self.evidence.trace.end.outcome == "completed"


@final
class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that lacks a capability which the scenario needs."""

    target: str
    topology: str
    reason: str


@final
class Absent(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that should have been driven and has no recording here."""

    target: str
    topology: str
    reason: str
    blame: Blame


Side = Judged | Missing | Absent


def compare(
    scenario: Scenario, baseline: Side, candidate: Side, twin: ScenarioTrace | None, noise: Sequence[NoiseFloor]
) -> list[Verdict]:
    """One verdict per check and, if both sides conform, one per facet with facts. A defect of the baseline that only the comparison
    shows is a verdict of its own.

    `twin` is the baseline's second take; `noise` comes from `noise.noise_floors` over the whole run. Two stacks that
    both lack a capability are not compared: each has its own verdict `missing`.
    """
    about = _About(scenario, baseline.target, candidate.target, candidate.topology)
    match baseline, candidate:
        case (Absent() as side, _) | (_, Absent() as side):
            reason = f"{_role(side, baseline)}: {side.reason}"
            return with_causes([(c, about(c.name, Parity.UNTESTABLE, reason, side.blame)) for c in scenario.checks])
        case Missing(), Missing():
            return []
        case Judged(), Missing():
            reason = candidate.reason
            return with_causes([(c, about(c.name, Parity.MISSING, reason, Blame.STACK)) for c in scenario.checks])
        case Missing(), Judged():
            reason = f"the baseline {baseline.reason}"
            return [about(c.name, Parity.ADDED, reason) for c in scenario.checks]
        case Judged(), Judged():
            verdicts = [*_checks(about, baseline, candidate), *_census(about, baseline, candidate)]
            if baseline.conforms and candidate.conforms:
                verdicts.extend(_facets(about, baseline, candidate, twin, noise))
            elif baseline.driven and candidate.driven:
                verdicts.extend(_beside_failures(about, baseline, candidate, twin, noise))
            return verdicts
        case _:
            raise TypeError(f"not two sides: {baseline!r}, {candidate!r}")


def unsettled(verdicts: Iterable[Verdict]) -> bool:
    """True if a second take of the baseline may show that a difference of the outputs is noise.

    `verdicts`: those of a comparison without a twin and without a noise floor. A difference whose cause has a name is none of
    chance. (318 scenarios of both stacks of SkyRL 0.2.0 were driven with a twin: 300 had the same verdicts without.)
    """
    of_chance = (curves.CHECK, gaps.CHECK)
    return any(
        v.status == Parity.UNTESTABLE or UNEXPLAINED in v.causes or (v.check in of_chance and v.status != Parity.PARITY)
        for v in verdicts
    )


def _role(side: Side, baseline: Side) -> str:
    return "baseline" if side is baseline else "candidate"


class _About:
    """Makes verdicts about one scenario of one pair of stacks."""

    def __init__(self, scenario: Scenario, baseline: str, candidate: str, topology: str) -> None:
        self.scenario, self.baseline, self.candidate, self.topology = scenario, baseline, candidate, topology

    def __call__(
        self,
        check: str,
        status: Parity,
        reason: str = "",
        blame: Blame | None = None,
        next_step: str = "",
        **details: Any,
    ) -> Verdict:
        return Verdict(
            scenario=self.scenario.name,
            wave=self.scenario.wave,
            task=self.scenario.task,
            promise=self.scenario.promise,
            topology=self.topology,
            check=check,
            target=self.candidate,
            baseline=self.baseline,
            status=status,
            blame=blame,
            reason=reason,
            next_step=next_step or (NEXT_STEP[blame] if blame else ""),
            **details,
        )


# --- per check ------------------------------------------------------------------------------------------------------


def _checks(about: _About, baseline: Judged, candidate: Judged) -> list[Verdict]:
    ours = {v.check: v for v in baseline.verdicts}
    theirs = {v.check: v for v in candidate.verdicts}
    found: list[Verdict] = []
    both_driven = baseline.driven and candidate.driven
    for name in {**ours, **theirs}:
        left, right = ours.get(name), theirs.get(name)
        if left is not None and right is not None:
            found.append(_check(about, name, left, right))
        elif not both_driven:
            continue
        elif name in _SILENT:
            told = ours.get(name) or theirs[name]
            if told.status != Conformance.PASS:
                found.append(_check(about, name, left or _kept(told), right or _kept(told)))
        elif (silent := baseline if left is None else candidate).conforms and not silent.refuses:
            # If the silent side failed one of its checks, that verdict already explains why nothing was found here. If it
            # refused, a cause of the outputs does.
            side = "baseline" if left is not None else "candidate"
            found.append(
                about(name, Parity.UNTESTABLE, f"{name} found something to judge on the {side} only", Blame.HARNESS)
            )
    return found


_SILENT = {check.name for check in ALWAYS if check.silent}


def _kept(other: Verdict) -> Verdict:
    """The verdict of a side that is silent beside this red one: it keeps the promise."""
    return msgspec.structs.replace(
        other,
        status=Conformance.PASS,
        blame=None,
        reason="",
        reasons=[],
        evidence=[],
        numbers={},
        because=None,
        concerns=[],
    )


def _check(about: _About, name: str, left: Verdict, right: Verdict) -> Verdict:
    untold = [(role, v) for role, v in (("baseline", left), ("candidate", right)) if v.status not in _CONFORMS]
    evidence = [{"side": role, **e} for role, v in (("baseline", left), ("candidate", right)) for e in v.evidence[:2]]
    details: dict[str, Any] = {
        "facts": min(left.facts, right.facts),
        "evidence": evidence,
        "numbers": {f"baseline {k}": x for k, x in left.numbers.items()}
        | {f"candidate {k}": x for k, x in right.numbers.items()},
        "fault": right.fault,
        "source": right.source,
    }
    if wrong := [v for v in (left, right) if v.status != Conformance.PASS]:
        because = {v.because for v in wrong}
        details["because"] = because.pop() if len(because) == 1 else None
        details["next_step"] = (untold[0][1] if untold else wrong[-1]).next_step
    if untold:
        reason = "; ".join(f"{role}: {v.reason}" for role, v in untold)
        return about(name, Parity.UNTESTABLE, reason, untold[0][1].blame or Blame.HARNESS, **details)
    status = _TABLE[_CONFORMS[left.status], _CONFORMS[right.status]]
    match status:
        case Parity.REGRESSION:
            return about(name, status, right.reason, right.blame, reasons=right.reasons, **details)
        case Parity.BASELINE_DEFECT:
            return about(name, status, left.reason, left.blame, reasons=left.reasons, **details)
        case Parity.BOTH_WRONG if left.reason == right.reason:
            return about(name, status, f"both: {right.reason}", right.blame, **details)
        case Parity.BOTH_WRONG:
            return about(name, status, f"baseline: {left.reason}; candidate: {right.reason}", right.blame, **details)
        case _:
            return about(name, status, **details)


_CONFORMS: dict[str, bool] = {Conformance.PASS: True, Conformance.FAIL: False}
_TABLE = {
    (True, True): Parity.PARITY,
    (True, False): Parity.REGRESSION,
    (False, True): Parity.BASELINE_DEFECT,
    (False, False): Parity.BOTH_WRONG,
}


# --- per facet, where both conform ----------------------------------------------------------------------------------


def _facets(
    about: _About, baseline: Judged, candidate: Judged, twin: ScenarioTrace | None, noise: Sequence[NoiseFloor]
) -> list[Verdict]:
    floor = next((n for n in noise if n.check == LOGPROBS), None)
    both = (baseline.evidence, candidate.evidence)
    aside = effects.apart(*both)
    found = lay_side_by_side(*both, twin, _bound(floor, both[0]), aside)
    facets = _all_facets(found, both, twin, aside)
    verdicts = [_facet(about, name, facet) for name, facet in facets.items() if facet.facts]
    verdicts.extend(_unpaired(about, found, both))
    verdicts.extend(_logprobs(about, found, floor, exact=_exact(baseline.evidence, candidate.evidence)))
    verdicts.extend(_errors(about, found, aside))
    verdicts.extend(_evaluation(about, baseline, candidate, twin))
    verdicts.extend(_gap(about, baseline, candidate, twin))
    return verdicts


def _bound(floor: NoiseFloor | None, baseline: Evidence) -> float:
    """The allowed difference of two log-probabilities, in nats: that of the baseline's twins, or what rounding moves if none was
    driven (what sends hundreds of requests is driven once)."""
    if floor is not None:
        return floor.bound
    try:
        return baseline.noise.near
    except UnansweredQuery:
        return 0.0


def _all_facets(
    found: Comparison,
    both: tuple[Evidence, Evidence],
    twin: ScenarioTrace | None,
    aside: tuple[Collection[Concern], Collection[Concern]],
) -> dict[str, Facet]:
    """Those of the outputs, of what the engines did, of fields of requests, and of headers."""
    return {
        **found.facets,
        **engine_facets.compare(*both, twin, found.pairing, aside),
        **effects.compare(*both),
        **headers.compare(both[0].trace, both[1].trace, found.pairing.pairs),
    }


def _beside_failures(
    about: _About, baseline: Judged, candidate: Judged, twin: ScenarioTrace | None, noise: Sequence[NoiseFloor]
) -> list[Verdict]:
    """Outputs that differ although no failed check found them wrong. Equal ones earn nothing: both sides may be wrong alike."""
    floor = next((n for n in noise if n.check == LOGPROBS), None)
    both = (baseline.evidence, candidate.evidence)
    apart = effects.apart(*both)
    aside = ({*baseline.concerns, *apart[0]}, {*candidate.concerns, *apart[1]})
    found = lay_side_by_side(*both, twin, _bound(floor, both[0]), aside)
    facets = _all_facets(found, both, twin, aside)
    fails = [
        f"the {role} fails {', '.join(side.broken)}"
        for role, side in (("baseline", baseline), ("candidate", candidate))
        if side.broken
    ]
    verdicts = [_facet(about, name, facet) for name, facet in facets.items() if facet.differences]
    more = [*_errors(about, found, aside), *_unpaired(about, found, both)]
    verdicts += [verdict for verdict in more if verdict.status is Parity.OPEN or ASKED_OTHERWISE in verdict.numbers]
    return [msgspec.structs.replace(v, reason=f"{v.reason} ({'; '.join(fails)})") for v in verdicts]


def _exact(baseline: Evidence, candidate: Evidence) -> bool:
    """True if right engines on both sides give the same numbers. Compiled kernels round differently from eager ones."""
    same_kernels = baseline.header.cuda_graphs == candidate.header.cuda_graphs
    return (
        candidate.header.topology.quantization is None and baseline.repeatable and candidate.repeatable and same_kernels
    )


def _evaluation(about: _About, baseline: Judged, candidate: Judged, twin: ScenarioTrace | None) -> list[Verdict]:
    """Compares the curves of two training runs; empty if the scenario is none."""
    found = curves.compare(baseline.evidence.trace, candidate.evidence.trace, twin)
    if found is None:
        return []
    blame = {Parity.REGRESSION: Blame.STACK, Parity.UNTESTABLE: Blame.HARNESS}.get(found.status)
    return [
        about(
            curves.CHECK,
            found.status,
            found.reason,
            blame,
            facts=found.facts,
            numbers=found.numbers,
            margin=found.margin if found.status == Parity.PARITY else None,
            evidence=[found.shown],
            fault="rollouts are subtly wrong, and a policy learns less from them",
            source='SkyRL #1014, task 1: "Evaluation accuracy is at least that of the legacy path"',
        )
    ]


def _census(about: _About, baseline: Judged, candidate: Judged) -> list[Verdict]:
    """What a caller of the client has to change; empty unless both stacks have a census. Judged whatever the checks say."""
    ours, theirs = census.offered(baseline.evidence.trace), census.offered(candidate.evidence.trace)
    if ours is None or theirs is None:
        return []
    of_release = released((one.target, one.evidence.header.packages) for one in (baseline, candidate))
    pair = "~".join(of_release.get(one.target) or one.target for one in (baseline, candidate))
    found = census.compare(ours, theirs, census.of_pair(pair, candidate.evidence.header.engine))
    counts = Counter(str(change.how) for change in found.changes)
    reasons = [
        f"{how} and without an entry: {', '.join(change.name for change in found.unexplained if change.how == how)}"
        for how in dict.fromkeys(change.how for change in found.unexplained)
    ]
    reasons += [f"an entry explains what is not there: {', '.join(found.stale)}"] if found.stale else []
    details: dict[str, Any] = {
        "facts": found.same + len(found.changes),
        "numbers": {"same": float(found.same)} | {how: float(count) for how, count in counts.items()},
        "changes": [*found.changes, *found.new],
        "fault": "a caller of the baseline's client breaks with the candidate's, and nobody has said how",
        "source": 'scenarios/client_changes.toml; the HTTP client\'s own docstring, "Replaces InferenceEngineInterface"',
    }
    if reasons:
        blame = Blame.STACK if found.unexplained else Blame.HARNESS
        shown = [{"name": one.name, "baseline": one.baseline, "candidate": one.candidate} for one in found.unexplained]
        details |= {"reasons": reasons if len(reasons) > 1 else [], "evidence": shown[:3]}
        return [about(census.CENSUS, Parity.REGRESSION, "; ".join(reasons), blame, **details)]
    if found.changes:
        reason = f"a caller has to change {', '.join(f'{count} {how}' for how, count in sorted(counts.items()))}"
        causes = {str(Why.CLIENT): len(found.changes)}
        return [about(census.CENSUS, Parity.OPEN, reason, causes=causes, **details)]
    return [about(census.CENSUS, Parity.PARITY, **details)]


def _gap(about: _About, baseline: Judged, candidate: Judged, twin: ScenarioTrace | None) -> list[Verdict]:
    """Compares the trainer gaps if the scenario promises agreement. A gap of the baseline alone is a red verdict of its own."""
    if GAP not in about.scenario.checks:
        return []
    ours, theirs = baseline.evidence, candidate.evidence
    found = gaps.compare(ours.trace, theirs.trace, twin, theirs.noise, exact=theirs.exact)
    blame = {Parity.PARITY: None, Parity.UNTESTABLE: Blame.HARNESS}.get(found.status, Blame.STACK)
    verdict = about(
        gaps.CHECK,
        found.status,
        found.reason,
        blame,
        facts=found.facts,
        numbers=found.numbers,
        margin=found.margin,
        fault="one stack's log-probabilities are slightly off: another temperature, one more rounding",
        source=GAP.source,
    )
    if found.status != Parity.BASELINE_DEFECT:
        return [verdict]
    own = msgspec.structs.replace(verdict, target=about.baseline, baseline=None, status=Conformance.FAIL)
    return [own, verdict]


def _facet(about: _About, name: str, facet: Facet) -> Verdict:
    numbers = {"differing": float(len(facet.differences)), "within_twin_noise": float(facet.noisy)}
    numbers |= {"after_a_near_tie": float(facet.parted)} if facet.parted else {}
    numbers |= {"candidate_faster": float(facet.faster)} if facet.faster else {}
    if facet.differences:
        where = sorted({_kind_of_place(d.call, d.place) for d in facet.differences})
        reason = f"{name} differ in {', '.join(where)}"
        causes = _causes(difference.why for difference in facet.differences)
        shown = facet.smallest()
        return about(name, Parity.OPEN, reason, facts=facet.facts, numbers=numbers, evidence=shown, causes=causes)
    why = [
        *(["where the baseline differs from its own twin as much"] if facet.noisy else []),
        *(["after a token at which rounding decides"] if facet.parted else []),
        *(["where the candidate is several times faster"] if facet.faster else []),
    ]
    reason = f"differs only {' or '.join(why)}" if why else ""
    return about(name, Parity.PARITY, reason, facts=facet.facts, numbers=numbers)


def _causes(found: Iterable[tuple[str, ...]]) -> dict[str, int]:
    """Cause → number of places that have it."""
    return dict(Counter(str(why) for whys in found for why in whys or (UNEXPLAINED,)).most_common())


def _kind_of_place(call: Call | None, place: str) -> str:
    """Where a difference lies, without numbers that vary with the input: "generate", "chat_completion choices[].index"."""
    if call is None:
        return "the sessions that share a server" if place.startswith("session ") else place
    if place.startswith(call.method):
        return place
    if call.method in CHOICES:
        return f"{call.method} {re.sub(r'[0-9]+', '', place)}"
    return call.method


def _unpaired(about: _About, found: Comparison, both: tuple[Evidence, Evidence]) -> list[Verdict]:
    pairing = found.pairing
    alone = [("baseline", c) for c in pairing.left_only] + [("candidate", c) for c in pairing.right_only]
    if not alone:
        return []
    evidence = [
        {"side": role, "call": call.method, "label": call.label, "request": call.request} for role, call in alone[:3]
    ]
    ours, theirs = (_enumerated(side.trace) for side in both)
    enumerates = bool(ours and theirs and ours != theirs)
    otherwise = _asked_otherwise(pairing) if enumerates else 0
    empty = otherwise > len(pairing.pairs)
    if enumerates and not empty:
        counts = ", ".join(
            f"{count} of {call} ({role})"
            for (role, call), count in sorted(Counter((role, call.method) for role, call in alone).items())
        )
        return [
            about(
                PAIRED,
                Parity.OPEN,
                f"the scenario asks each stack for all that it has, and the stacks have different things: {counts}",
                facts=len(pairing.pairs),
                causes={Why.ASKED_OF_ONE: len(alone)},
                evidence=evidence,
            )
        ]
    if _follow_parted_answers(found):
        return [
            about(
                PAIRED,
                Parity.PARITY,
                "requests differ only where they follow answers that part at a token at which rounding decides",
                facts=len(pairing.pairs),
                numbers={"after_a_near_tie": float(len(alone))},
            )
        ]
    methods = sorted({f"{call.method} ({role})" for role, call in alone})
    more = f"; {otherwise} of the same cases were asked with other requests" if empty else ""
    return [
        about(
            PAIRED,
            Parity.UNTESTABLE,
            f"calls without a partner on the other side: {', '.join(methods)}{more}",
            Blame.HARNESS,
            facts=len(pairing.pairs),
            numbers={"unpaired": float(len(alone)), **({ASKED_OTHERWISE: float(otherwise)} if empty else {})},
            evidence=evidence,
        )
    ]


def _enumerated(trace: ScenarioTrace) -> list[float]:
    """Number of cases in each enumeration of the scenario: they are what the stack itself says that it has."""
    return [sum(mark.numbers.values()) for mark in trace.own_marks if mark.name == ENUMERATED]


def _asked_otherwise(pairing: Pairing) -> int:
    """Cases of one name that each side was asked with another request. Few may be: values are drawn from schemas that differ. If
    they are more than the pairs, the scenario's requests depend on what else a stack has, and next to nothing is compared."""
    ours, theirs = (
        {(call.method, call.label) for call in calls if call.label} for calls in (pairing.left_only, pairing.right_only)
    )
    return len(ours & theirs)


def _follow_parted_answers(found: Comparison) -> bool:
    """True if both sides have as many calls without a partner, of each method and label, and all begin after answers that parted
    where rounding decides: a scenario asks a later turn with the side's own earlier answers."""
    alone = (found.pairing.left_only, found.pairing.right_only)
    parted = [pair for pair in found.pairing.pairs if pair[0].id in found.parted]
    kinds = [Counter((call.method, call.label) for call in calls) for calls in alone]
    return (
        bool(parted)
        and kinds[0] == kinds[1]
        and all(
            call.started_ns > min(answer.ended_ns for answer in answers)
            for calls, answers in zip(alone, zip(*parted, strict=True), strict=True)
            for call in calls
        )
    )


def _logprobs(about: _About, found: Comparison, floor: NoiseFloor | None, *, exact: bool) -> list[Verdict]:
    """`exact`: from `_exact`. If False, the noise of single numbers may hide small faults, since the reference has judged both
    sides; a difference beyond the bound is left open."""
    numbers = found.logprobs
    if not numbers.facts:
        if not found.incomparable:
            return []
        return [about(LOGPROBS, Parity.UNTESTABLE, "no token in common to compare log-probabilities on", Blame.HARNESS)]
    measured = {"max_abs_difference": numbers.largest, "one_sided": float(numbers.one_sided)}
    if floor is not None:
        measured |= {"noise_floor": floor.floor, "bound": floor.bound}
        if floor.weakest_fault is not None:
            measured["weakest_fault"] = floor.weakest_fault
    details: dict[str, Any] = {
        "facts": numbers.facts,
        "numbers": measured,
        "evidence": [d.shown for d in sorted(numbers.beyond, key=lambda d: d.size)[:3]],
    }
    if numbers.largest > 0 and exact:
        useless = _useless(floor)
        if useless:
            return [about(LOGPROBS, Parity.UNTESTABLE, useless, Blame.HARNESS, **details)]
    if numbers.one_sided:
        reason = "one side has no log-probability for a token for which the other has one"
        causes = {Why.LOGPROBS_UNASKED: numbers.unasked, UNEXPLAINED: numbers.one_sided - numbers.unasked}
        found_causes = {str(why): count for why, count in causes.items() if count}
        return [about(LOGPROBS, Parity.OPEN, reason, causes=found_causes, **details)]
    if numbers.beyond:
        reason = "log-probabilities differ by more than the run's bound"
        return [about(LOGPROBS, Parity.OPEN, reason, causes=_causes(d.why for d in numbers.beyond), **details)]
    return [about(LOGPROBS, Parity.PARITY, **details)]


def _useless(floor: NoiseFloor | None) -> str:
    """Why the bound cannot judge; empty if it can."""
    if floor is None:
        return "log-probabilities differ and no twin of the baseline was driven to say how much is noise"
    if floor.weakest_fault is None or floor.bound >= floor.weakest_fault:
        return "the noise of the baseline hides the weakest seeded fault: the bound is of no use"
    return ""


def _errors(about: _About, found: Comparison, aside: tuple[Collection[Concern], Collection[Concern]]) -> list[Verdict]:
    """Errors earn parity only if a check of the scenario judged that they were caused as meant. Calls that either side sets aside are
    not compared."""
    errors = [one for one in found.errors if not covered(one[0], aside[0]) and not covered(one[1], aside[1])]
    if not errors:
        return []
    sides = [
        _ErrorPair(call=left, baseline=error_of(left), candidate=error_of(right), why=why)
        for left, right, why in errors
    ]
    judged = {check.errors_of for check in about.scenario.checks}
    uncaused = [s for s in sides if EVERY not in judged and (s.call.label or "") not in judged]
    differing = [s for s in sides if s.baseline != s.candidate]
    shown = sorted(uncaused or differing or sides, key=lambda s: len(str(s.call.request)))[:3]
    details: dict[str, Any] = {
        "facts": len(errors),
        "numbers": {"differing": float(len(differing)), "uncaused": float(len(uncaused))},
        "evidence": [s.shown for s in shown],
    }
    if any(s.baseline and s.candidate for s in uncaused):
        reason = "both sides fail and no check of the scenario judged that the errors were caused as meant"
        return [about(ERRORS, Parity.BOTH_WRONG, reason, Blame.STACK, **details)]
    if uncaused:
        reason = "a call fails on one side and no check of the scenario judges its error"
        return [about(ERRORS, Parity.UNTESTABLE, reason, Blame.HARNESS, **details)]
    if differing:
        kinds = sorted({f"{_name(s.baseline)} / {_name(s.candidate)}" for s in differing})
        causes = _causes(s.why or _refusal(s) for s in differing)
        reason = f"errors differ (baseline / candidate): {', '.join(kinds)}"
        return [about(ERRORS, Parity.OPEN, reason, causes=causes, **details)]
    return [about(ERRORS, Parity.PARITY, **details)]


def _refusal(pair: _ErrorPair) -> tuple[str, ...]:
    """The cause of an error that a check allows, if the other side answers."""
    return (Why.REFUSED_BY_ONE,) if pair.baseline is None or pair.candidate is None else ()


@final
class _ErrorPair(msgspec.Struct, frozen=True, kw_only=True):
    """How a call failed on either side; None if it succeeded there."""

    call: Call
    baseline: dict[str, Any] | None
    candidate: dict[str, Any] | None
    why: tuple[str, ...]

    @property
    def shown(self) -> dict[str, Any]:
        about = {"call": self.call.method, "label": self.call.label, "request": self.call.request}
        return about | {"baseline": self.baseline, "candidate": self.candidate}


def _name(error: dict[str, Any] | None) -> str:
    if error is None:
        return "no error"
    status = f" {error['status']}" if error["status"] is not None else ""
    blamed = f" of {error['param']}" if error["param"] is not None else ""
    return f"{error['how']} {error['kind']}{status}{blamed}"
