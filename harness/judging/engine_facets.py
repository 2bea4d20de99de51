"""What two stacks made their engines do, side by side: requests, attempts, concurrency, times, order of control calls. Pure.

Answers can be equal although the engines worked otherwise: each request twice, one after another, or all on one server. What follows
from chance and time is compared robustly: a difference counts only beyond a stated factor and beyond the baseline's own from its twin.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, final

import msgspec

from harness.checks.base import UNTOLD, Evidence, Execution, kept
from harness.checks.echo import CONTROL_ARGUMENTS, CONTROL_OPS
from harness.checks.matching import Row, assignment
from harness.checks.pausing import dropped, pauses
from harness.checks.trainer_runs import broken_off
from harness.contract.messages import METHODS, Plane
from harness.judging.causes import Why
from harness.judging.facets import NOT_THERE, deterministic, error_of
from harness.judging.pace import FAR, LEAST_TOKENS, Pace, over
from harness.judging.pairing import Pairing, pair
from harness.judging.sides import Difference, Facet, after_a_death, covered, given_up, on_a_broken_hop, overlaps
from harness.records.recording import Call, Observation, ScenarioTrace, most_at_once
from harness.records.verdict import Concern

REQUESTS = "engines.requests"
ATTEMPTS = "engines.attempts"
PARAMETERS = "engines.parameters"
CONCURRENCY = "engines.concurrency"
SECONDS = "engines.seconds"
ORDER = "engines.order"

FACTOR = 2
"""Concurrency differs if one side's is at least this many times the other's."""
CHANCE = 4.5
"""Standard deviations between the loads of two stacks that draw servers at random: one comparison in 100,000 is beyond."""
LEAST_S = 0.1
"""Shorter requests are not compared: their time is that of the hops, in seconds."""
LONG_S = 5.0
"""Few requests are compared only if one side takes longer, in seconds: no busy machine halts a request for so long."""


@final
class _Both(msgspec.Struct, frozen=True, kw_only=True):
    """The paired calls of two stacks that are compared, with the baseline's second take."""

    baseline: Evidence
    candidate: Evidence
    twin: Evidence | None
    pairs: list[tuple[Call, Call]]
    again: dict[int, Call]
    """Id of the baseline's call → the same call of its second take."""

    @property
    def sides(self) -> list[tuple[Evidence, frozenset[int]]]:
        """Each side with the ids of its compared calls: baseline, candidate, and the twin if there is one."""
        again = [self.again[left.id].id for left, _ in self.pairs if left.id in self.again]
        found = [(self.baseline, [left.id for left, _ in self.pairs]), (self.candidate, [r.id for _, r in self.pairs])]
        found += [(self.twin, again)] if self.twin is not None and len(again) == len(self.pairs) else []
        return [(evidence, frozenset(ids)) for evidence, ids in found]


def compare(
    baseline: Evidence,
    candidate: Evidence,
    twin: ScenarioTrace | None,
    pairing: Pairing,
    aside: tuple[Collection[Concern], Collection[Concern]] = ((), ()),
) -> dict[str, Facet]:
    """The facets of the engines by name. `aside` is as in `lay_side_by_side`: such a call is left out whole. Without an observed
    request on both sides only times are compared."""
    again = None if twin is None else Evidence(twin, baseline.reference)
    both = _Both(
        baseline=baseline,
        candidate=candidate,
        twin=again,
        pairs=[
            calls
            for calls in pairing.pairs
            if not any(covered(call, concerns) for call, concerns in zip(calls, aside, strict=True))
        ],
        again={} if twin is None else pair(baseline.trace, twin).partner_of(),
    )
    found = {SECONDS: _seconds(both)}
    if baseline.all_executions and candidate.all_executions:
        answered = _answered(both)
        found |= {ATTEMPTS: _attempts(both), CONCURRENCY: _concurrency(answered), ORDER: _order(both)}
        found[REQUESTS] = _requests(answered, found[ATTEMPTS])
        found[PARAMETERS] = _parameters(answered)
    return found


# --- attempts -------------------------------------------------------------------------------------------------------


@kept
def _executions_of(evidence: Evidence) -> dict[int, dict[int, list[Execution]]]:
    """Call id → row → every execution of it, also those that ended early or whose tokens nobody got. Rows whose prompt is unknown and
    that no execution fits are left out."""
    found = assignment(evidence)
    by_row = {(row.call.id, row.index): list(found.where(row)) for row in found.rows}
    for execution in (*found.repeated, *found.aborted):
        row = _asker(found.rows, execution)
        if row is not None:
            by_row[row.call.id, row.index].append(execution)
    by_call: dict[int, dict[int, list[Execution]]] = defaultdict(dict)
    for row in found.rows:
        executions = by_row[row.call.id, row.index]
        if executions or row.prompt is not None:
            by_call[row.call.id][row.index] = executions
    return by_call


def _asker(rows: Iterable[Row], execution: Execution) -> Row | None:
    asked = (r for r in rows if r.prompt == execution.prompt and r.call.started_ns <= execution.started_ns)
    return max(asked, key=lambda row: row.call.started_ns, default=None)


def _attempts(both: _Both) -> Facet:
    facet = Facet()
    for left, right in both.pairs:
        ours, theirs = _attempts_of(both.baseline, left), _attempts_of(both.candidate, right)
        twin = both.again.get(left.id)
        twins = _attempts_of(both.twin, twin) if both.twin is not None and twin is not None else {}
        failed = error_of(left) is not None or error_of(right) is not None
        if failed:
            ours, theirs, twins = ({} if not side else {"the call": _in_words(side)} for side in (ours, theirs, twins))
        paused = overlaps(left, both.baseline, "pause") or overlaps(right, both.candidate, "pause")
        for place in ours.keys() & theirs.keys():
            a, b = ours[place], theirs[place]
            why: tuple[str, ...] = (Why.INTERRUPTED,) if paused else ()
            if after_a_death(left, both.baseline) and after_a_death(right, both.candidate):
                why = (Why.SERVER_DIED,)
            if failed:
                why = (Why.REFUSED_ELSEWHERE if _NONE in (a, b) else Why.ASKED_AGAIN,)
            if on_a_broken_hop(left, both.baseline) and on_a_broken_hop(right, both.candidate):
                why = (Why.HOP_BROKEN,)
            facet.compare(place, (a, b), why, noisy=place in twins and twins[place] != a, call=left)
    return facet


def _attempts_of(evidence: Evidence, call: Call) -> dict[str, Any]:
    return {f"row {row}": len(found) for row, found in _executions_of(evidence).get(call.id, {}).items()}


_NONE = "it reached no engine"


def _in_words(attempts: dict[str, int]) -> str:
    """The attempts of a call that fails. Time decides which rows of a batch reach an engine before the batch fails."""
    if max(attempts.values()) > 1:
        return "a row reached an engine more than once"
    return _NONE if len(attempts) == 1 and not any(attempts.values()) else "no row reached an engine more than once"


# --- sampling parameters --------------------------------------------------------------------------------------------


def _parameters(both: _Both) -> Facet:
    """Each sampling parameter with the values that the engines got for the rows of a call. `echo` judges what the call asks for; here
    the rest shows too: what each stack fills in."""
    facet = Facet()
    for left, right in both.pairs:
        ours, theirs = _values(both.baseline, left), _values(both.candidate, right)
        for name in sorted({*ours, *theirs}) if ours and theirs else ():
            sides = ours.get(name, NOT_THERE), theirs.get(name, NOT_THERE)
            facet.compare(name, sides, (f"{Why.PARAMETER}:{name}",), noisy=False, call=left)
    return facet


def _values(evidence: Evidence, call: Call) -> dict[str, str]:
    """Parameter → its values in all rows, each once."""
    found: dict[str, set[str]] = defaultdict(set)
    for executions in _executions_of(evidence).get(call.id, {}).values():
        for name, value in executions[0].sampling_params.items() if executions else ():
            whole = int(value) if isinstance(value, float) and value.is_integer() else value
            found[name].add(json.dumps(whole, sort_keys=True))
        for salt in {one.cache_salt for one in executions} - {None, UNTOLD}:
            found["cache_salt"].add(json.dumps(salt))
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


# --- requests per server --------------------------------------------------------------------------------------------


def _answered(both: _Both) -> _Both:
    """Without failing calls, since time decides how many of their rows run; and without sampled conversations, whose turns vary.
    `_units` leaves out what a trainer's run asks for that does not reach its end, for the same reason."""

    def counts(call: Call) -> bool:
        return error_of(call) is None and (call.method != "gym_generate" or deterministic(call))

    return msgspec.structs.replace(both, pairs=[calls for calls in both.pairs if all(map(counts, calls))])


def _requests(both: _Both, attempts: Facet) -> Facet:
    facet = Facet()
    spreads = [_by_server(evidence, ids) for evidence, ids in both.sides]
    ours, theirs, *twins = spreads
    if not any(ours) and not any(theirs):
        return facet
    facet.facts = len(ours) + 1
    if sum(ours) != sum(theirs):
        if any(abs(sum(ours) - sum(theirs)) <= abs(sum(ours) - sum(twin)) for twin in twins):
            facet.noisy += 1
        else:
            why = tuple(dict.fromkeys(w for difference in attempts.differences for w in difference.why))
            whole, others = (sum(_by_server(*side, whole=True)) for side in both.sides[:2])
            why = why or ((Why.INTERRUPTED,) if whole == others else ())
            facet.differences.append(
                Difference(place="requests in all", baseline=sum(ours), candidate=sum(theirs), why=why)
            )
    elif _apart(ours, theirs) > max([_chance(*both.sides[0]), *(_apart(ours, twin) for twin in twins)]):
        facet.differences.append(
            Difference(place="requests per server", baseline=ours, candidate=theirs, why=(Why.OTHER_SPREAD,))
        )
    return facet


def _units(evidence: Evidence, calls: Collection[int]) -> list[list[Execution]]:
    """Executions of these calls and of no call, in groups that go to a server together: the turns of a session, or one alone."""
    found = assignment(evidence)
    sessions: dict[str, list[Execution]] = defaultdict(list)
    alone: list[list[Execution]] = []
    for row in (r for r in found.rows if r.call.id in calls):
        if row.session is None:
            alone += [[execution] for execution in found.where(row)]
        else:
            sessions[str(row.session)] += found.where(row)
    left_out: list[tuple[int, float]] = [
        (row.call.started_ns, row.call.ended_ns) for row in found.rows if row.call.id not in calls
    ]
    left_out += [(began, math.inf) for began in broken_off(evidence)]
    rowless = [
        [e]
        for e in (*found.repeated, *found.aborted, *found.strangers)
        if not any(began <= e.started_ns <= ended for began, ended in left_out)
    ]
    return [*sessions.values(), *alone, *rowless]


def _by_server(evidence: Evidence, calls: Collection[int], *, whole: bool = False) -> list[int]:
    """Number of these executions on each server, in order of size: stacks number their servers differently. `whole`: without those
    that were cut short."""
    every = (execution for unit in _units(evidence, calls) for execution in unit)
    found = Counter(e.server for e in every if not (whole and e.finish_reason in (None, "abort")))
    return sorted(found[server] for server in {*evidence.header.servers, *found})


def _apart(one: Sequence[int], other: Sequence[int]) -> int:
    """Largest difference between the loads of two servers of one rank."""
    return max((abs(a - b) for a, b in zip(one[::-1], other[::-1], strict=False)), default=0)


def _chance(evidence: Evidence, calls: Collection[int]) -> float:
    """How far apart the loads of a server may be on two stacks that both draw a server for each unit."""
    share = 1 / len(evidence.header.servers)
    return CHANCE * math.sqrt(2 * share * (1 - share) * sum(len(unit) ** 2 for unit in _units(evidence, calls)))


# --- concurrency ----------------------------------------------------------------------------------------------------


def _concurrency(both: _Both) -> Facet:
    facet = Facet()
    sides = [_runs(evidence, ids) for evidence, ids in both.sides]
    if not all(sides[:2]):
        return facet
    drawn = _chance(*both.sides[0])
    for place, each, chance in (("in all", False, 0.0), ("at one server", True, drawn)):
        ours, theirs, *twins = [_peak(runs, each=each) for runs in sides]
        facet.facts += 1
        if abs(ours - theirs) <= chance or not _far(ours, theirs):
            continue
        if any(_far(ours, twin) or not _far(twin, theirs) for twin in twins):
            facet.noisy += 1
            continue
        spread = each and not facet.differences and not facet.noisy
        why = (Why.OTHER_SPREAD,) if spread else _why_fewer(sides[0] if ours < theirs else sides[1])
        if both.baseline.succeeded("kill_server") and both.candidate.succeeded("kill_server"):
            why = (Why.SERVER_DIED,)
        facet.differences.append(Difference(place=f"most at once {place}", baseline=ours, candidate=theirs, why=why))
    return facet


def _far(one: int, other: int) -> bool:
    return max(one, other) >= FACTOR * min(one, other)


@final
class _Run(msgspec.Struct, frozen=True, kw_only=True):
    call: int
    asked_ns: int
    """When the call began."""
    server: str
    from_ns: int
    to_ns: int


def _runs(evidence: Evidence, calls: Collection[int]) -> list[_Run]:
    """The executions of these calls with `LEAST_TOKENS` or more: shorter ones end before the next one begins."""
    gone = dropped(evidence)
    asked_ns = {call.id: call.started_ns for call in evidence.calls()}
    return [
        _Run(
            call=call,
            asked_ns=asked_ns[call],
            server=e.server,
            from_ns=e.started_ns,
            to_ns=e.ended_ns or gone.get((e.server, e.request_id)) or e.step_ns[-1],
        )
        for call in calls
        for executions in _executions_of(evidence).get(call, {}).values()
        for e in executions
        if len(e.tokens) >= LEAST_TOKENS
    ]


def _peak(runs: Sequence[_Run], *, each: bool) -> int:
    """Most executions that ran at once, in all or at one server."""
    places: set[str | None] = {run.server for run in runs} if each else {None}
    at_each = ([(run.from_ns, run.to_ns) for run in runs if place in (None, run.server)] for place in places)
    return max(map(most_at_once, at_each), default=0)


def _why_fewer(runs: Sequence[_Run]) -> tuple[str, ...]:
    """Why few ran at once: the rows of a call ran one after another, or some came so late that the first ones had ended."""
    by_call: dict[int, list[_Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.from_ns):
        by_call[run.call].append(run)
    if any(len(rows) > 1 and all(a.to_ns <= b.from_ns for a, b in pairwise(rows)) for rows in by_call.values()):
        return (Why.ONE_BY_ONE,)
    long_ns = statistics.median(run.to_ns - run.from_ns for run in runs)
    return (Why.STAGGERED,) if any(run.from_ns - run.asked_ns > long_ns for run in runs) else ()


# --- seconds per request --------------------------------------------------------------------------------------------


def _seconds(both: _Both) -> Facet:
    """Without calls that a pause holds or that the scenario gave up, and without what only the harness asks.

    A candidate that is faster is no difference, unless its calls fail: a call that fails sooner does less.

    The stacks run one after the other, and a shared machine is slower at times: a difference has to be as large in units of the
    engines' own steps.
    """
    facet = Facet()
    machine = _step_s(both.candidate) / _step_s(both.baseline)
    groups: dict[str, list[tuple[Call, Call]]] = defaultdict(list)
    paused = pauses(both.baseline), pauses(both.candidate)
    for left, right in both.pairs:
        if METHODS[left.method].plane is Plane.OUT_OF_BAND or any(
            given_up(call) or any(p.asked_ns < call.ended_ns and call.started_ns < p.to_ns for p in held)
            for call, held in zip((left, right), paused, strict=True)
        ):
            continue
        fails = any(error_of(call) is not None for call in (left, right))
        groups[f"{left.method}{' that fails' if fails else ''}"].append((left, right))
    for place, calls in groups.items():
        facet.facts += len(calls)
        pace = over((_took(left), _took(right)) for left, right in calls)
        spread = min(pace.spread, over((_took(left) * machine, _took(right)) for left, right in calls).spread)
        twins = [(left, both.again[left.id]) for left, _ in calls if left.id in both.again]
        noise = over((_took(left), _took(again)) for left, again in twins).spread
        ours, theirs = (statistics.median(_took(pair[side]) for pair in calls) for side in (0, 1))
        if spread <= FAR or max(ours, theirs) < (LEAST_S if pace.enough else LONG_S):
            continue
        if spread <= max(FAR, noise):
            facet.noisy += 1
            continue
        if pace.ratio < 1 and not _fails(calls, candidate=True):
            facet.faster += 1
            continue
        facet.differences.append(
            Difference(
                call=calls[0][0],
                place=place,
                baseline={"median seconds": round(ours, 3)},
                candidate={"median seconds": round(theirs, 3)},
                why=_why_slow(both, calls, pace),
            )
        )
    return facet


def _step_s(evidence: Evidence) -> float:
    """Median time between two tokens of a request at an engine, in seconds; 1 if no request had two."""
    gaps = [later - earlier for e in evidence.executions for earlier, later in pairwise(e.step_ns) if later > earlier]
    return statistics.median(gaps) / 1e9 if gaps else 1.0


def _took(call: Call) -> float:
    return (call.ended_ns - call.started_ns) / 1e9


def _fails(calls: Iterable[tuple[Call, Call]], *, candidate: bool) -> bool:
    """True if one of the calls fails on that side."""
    return any(error_of(pair[candidate]) is not None for pair in calls)


def _why_slow(both: _Both, calls: Sequence[tuple[Call, Call]], pace: Pace) -> tuple[str, ...]:
    """Of a slower candidate, or of one whose calls fail sooner. That requests reach the engines late is a reason where half of the
    time was spent before them."""
    if _fails(calls, candidate=True):
        return (Why.SLOW_TO_FAIL if pace.ratio > 1 else Why.QUICK_TO_FAIL,)
    runs = _runs(both.candidate, [right.id for _, right in calls])
    why = _why_fewer(runs) if runs else ()
    if Why.STAGGERED in why:
        longer_s = max(_took(right) - _took(left) for left, right in calls)
        return why if 2 * max(run.from_ns - run.asked_ns for run in runs) / 1e9 > longer_s else ()
    return why


# --- order of control calls -----------------------------------------------------------------------------------------

_BY_OP = {op: (method, CONTROL_ARGUMENTS.get(method, {})) for method, op in CONTROL_OPS.items()}
_STEPS = {
    "reset_prefix_cache": Why.CACHE_RESET,
    "pause_generation": Why.PAUSE_WITHIN,
    "resume_generation": Why.PAUSE_WITHIN,
    "sleep": Why.SLEEP_WITHIN,
    "wake_up": Why.SLEEP_WITHIN,
}
"""Step that only one stack makes → the cause."""
_SYNCS = ("prepare_weight_sync", "sync_weights")
_STAGED = (*_SYNCS, "load_lora_adapter", "unload_lora_adapter")
_OF_A_RUN = ("start_trainer_run", "trainer_wants", "trainer_goes_on", "end_trainer_run")
"""The stack's own trainer makes its steps whenever it runs, in whichever of these calls."""


def _order(both: _Both) -> Facet:
    facet = Facet()
    twin = both.twin
    dead = {
        left.id
        for left, right in both.pairs
        if after_a_death(left, both.baseline) and after_a_death(right, both.candidate)
    }
    found: list[tuple[Call | None, str, list[list[str]], list[list[str]], list[list[str]] | None]] = [
        (None, place, steps(both.baseline), steps(both.candidate), None if twin is None else steps(twin))
        for place, steps in (("between control calls", _between), ("a trainer's run", _of_a_run))
    ]
    for left, right in both.pairs:
        alone = _alone(left, both.baseline) and _alone(right, both.candidate)
        if METHODS[left.method].plane is Plane.CONTROL and left.method not in _OF_A_RUN and alone:
            failed = left.error is not None or right.error is not None
            again = both.again.get(left.id)
            twins = None if twin is None or again is None else _during(twin, again, failed=failed)
            sides = _during(both.baseline, left, failed=failed), _during(both.candidate, right, failed=failed)
            found.append((left, left.method, *sides, twins))
    for call, place, a, b, twins in found:
        if not any(a) and not any(b):
            continue
        why = (Why.SERVER_DIED,) if call is not None and call.id in dead else _why_steps(place, a, b)
        facet.compare(place, (a, b), why, noisy=twins is not None and twins != a, call=call)
    return facet


def _alone(call: Call, evidence: Evidence) -> bool:
    """True if all steps of the control calls before are done and no other control call overlaps the call: only then does the
    contract order their steps."""
    others = [c for c in evidence.calls() if METHODS[c.method].plane is Plane.CONTROL and c.id != call.id]
    before = [other for other in others if other.ended_ns <= call.started_ns]
    failed = max(before, key=lambda other: other.ended_ns).error is not None if before else False
    return not failed and all(other in before or call.ended_ns <= other.started_ns for other in others)


def _during(evidence: Evidence, call: Call, *, failed: bool) -> list[list[str]]:
    """The steps of a call at each server. Of one that failed on a stack only the kinds of steps, those of the next control call
    among them (`_alone` leaves that one out): it may have returned while servers were still at work."""
    until_ns = _settled_ns(evidence, call) if failed else call.ended_ns
    steps = _steps(evidence, (s for s in evidence.controls() if call.started_ns <= s.at_ns <= until_ns))
    return [sorted({step for at_server in steps for step in at_server})] if failed else steps


def _settled_ns(evidence: Evidence, call: Call) -> int:
    """End of the next control call, or of the scenario if there is none."""
    later = [c for c in evidence.calls() if METHODS[c.method].plane is Plane.CONTROL and c.started_ns >= call.ended_ns]
    return min(later, key=lambda c: c.started_ns).ended_ns if later else evidence.trace.end.at_ns


def _within(seen: Observation, spans: Iterable[tuple[int, int]]) -> bool:
    return any(begin <= seen.at_ns <= end for begin, end in spans)


def _run_ns(evidence: Evidence) -> list[tuple[int, int]]:
    """Begin and end of the run of the stack's own trainer; empty if it has none."""
    own = [call for method in _OF_A_RUN for call in evidence.calls(method)]
    return [(min(c.started_ns for c in own), max(c.ended_ns for c in own))] if own else []


def _of_a_run(evidence: Evidence) -> list[list[str]]:
    """Steps that the stack's own trainer makes: all of its run but those of syncs, which are compared by themselves."""
    run = _run_ns(evidence)
    syncs = [(c.started_ns, c.ended_ns) for method in _SYNCS for c in evidence.calls(method)]
    own = (seen for seen in evidence.controls() if _within(seen, run) and not _within(seen, syncs))
    return _steps(evidence, own)


def _between(evidence: Evidence) -> list[list[str]]:
    """Steps that no control call and no run of the stack's own trainer explains, such as one that a stack makes after its call
    returned."""
    spans = _run_ns(evidence)
    spans += [
        (call.started_ns, call.ended_ns if call.error is None else _settled_ns(evidence, call))
        for call in evidence.calls()
        if METHODS[call.method].plane is not Plane.DATA
    ]
    left = (s for s in evidence.controls() if s.at_ns >= evidence.began_ns and not _within(s, spans))
    return _steps(evidence, left)


def _steps(evidence: Evidence, controls: Iterable[Observation]) -> list[list[str]]:
    """What each server was told, in order. Equal steps in a row count once: a sync has as many as it has chunks. Servers have no
    names here, since each stack has its own."""
    found: dict[str, list[str]] = {server: [] for server in evidence.header.servers}
    for seen in controls:
        steps = found.setdefault(seen.server, [])
        step = _step(seen)
        if steps[-1:] != [step]:
            steps.append(step)
    return sorted(found.values())


def _step(seen: Observation) -> str:
    op, arguments = seen.data["op"], seen.data["arguments"]
    if op == "collective_rpc":
        op = str(arguments.get("method"))
    _, defaults = _BY_OP.get(op, ("", {}))
    named = ", ".join(f"{name}={arguments.get(name, default)}" for name, default in defaults.items())
    return f"{op}({named})" + (" fails" if seen.data.get("error") else "")


def _why_steps(place: str, baseline: list[list[str]], candidate: list[list[str]]) -> tuple[str, ...]:
    ours, theirs = (Counter(step for steps in side for step in steps) for side in (baseline, candidate))
    differing = set((ours - theirs) + (theirs - ours))
    if not differing:
        return (Why.OTHER_ORDER,)
    bare, other = (Counter(step.partition("(")[0] for step in side.elements()) for side in (ours, theirs))
    if bare == other:
        return (Why.OTHER_ARGUMENTS,) if not any(step.endswith("fails") for step in differing) else ()
    ops = {step.partition("(")[0] for step in differing}
    if place == "sleep" and ops == {"reset_prefix_cache"}:
        return (Why.CACHE_RESET_AT_SLEEP,)
    why = {_STEPS.get(op, Why.SYNC_STAGES if place in _STAGED else None) for op in ops}
    return () if None in why else tuple(sorted(one for one in why if one is not None))
