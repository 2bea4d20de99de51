"""The facets of two conforming traces side by side: compared values, differences, and which of them are noise. Pure."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, final

import msgspec

from harness.checks.base import Evidence, Execution
from harness.checks.matching import assignment, rows
from harness.contract.errors import Blame
from harness.contract.messages import LISTS
from harness.judging import forms, partings
from harness.judging.causes import FOLLOWING, Asked, Why, of_failure, of_place
from harness.judging.facets import (
    BODIES,
    NOT_THERE,
    PARTITION,
    STOP_REASONS,
    TOKENS,
    deterministic,
    error_of,
    prompt_of,
    side_by_side,
    size_of,
)
from harness.judging.noise import deltas
from harness.judging.pairing import Pairing, pair
from harness.judging.partings import Parted, explains, row_of
from harness.records.differing import common_prefix
from harness.records.recording import Call, ScenarioTrace
from harness.records.verdict import Concern


@final
class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One place where the two sides differ. `size` is that of the input: the smallest is shown first."""

    call: Call | None = None
    place: str
    baseline: Any
    candidate: Any
    size: int = 0
    why: tuple[str, ...] = ()
    """Causes that the recordings tell; without any the difference is unexplained."""

    @property
    def shown(self) -> dict[str, Any]:
        """The difference as evidence: the call, its input, both sides."""
        sides = {"place": self.place, "baseline": self.baseline, "candidate": self.candidate}
        if self.call is None:
            return sides
        about = {"call": self.call.method, "label": self.call.label, "input": prompt_of(self.call, self.place)}
        params = self.call.request.get("sampling_params")
        return about | ({"sampling_params": params} if params else {}) | sides


@final
class Facet(msgspec.Struct, kw_only=True):
    """One facet while it is being compared."""

    facts: int = 0
    differences: list[Difference] = []
    noisy: int = 0
    """Differences that are no larger than the baseline's from its own twin, at the same place."""
    faster: int = 0
    """Differences in time where the candidate is faster."""
    parted: int = 0
    """Differences after a parting where rounding decides (`harness.judging.partings`)."""

    def compare(
        self, place: str, sides: tuple[Any, Any], why: tuple[str, ...] = (), *, noisy: bool, call: Call | None = None
    ) -> None:
        """Count a place with its two values. A difference is noise if the baseline's own twin differs there (`noisy`)."""
        self.facts += 1
        baseline, candidate = sides
        if baseline == candidate:
            return
        if noisy:
            self.noisy += 1
            return
        size = 0 if call is None else size_of(call, place)
        self.differences.append(
            Difference(call=call, place=place, baseline=baseline, candidate=candidate, size=size, why=why)
        )

    def smallest(self) -> list[dict[str, Any]]:
        """The three smallest inputs; those without a cause first."""
        return [d.shown for d in sorted(self.differences, key=lambda d: (bool(d.why), d.size))[:3]]


@final
class Numbers(msgspec.Struct, kw_only=True):
    """Log-probabilities while they are being compared."""

    facts: int = 0
    largest: float = 0.0
    """Largest finite difference, in nats."""
    one_sided: int = 0
    """Tokens with a number on one side only."""
    unasked: int = 0
    """Of these, tokens whose request asks for no numbers."""
    beyond: list[Difference] = []
    """Differences beyond the bound."""


@final
class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two traces side by side. `errors` are pairs in which at least one side failed, with the causes in case they differ."""

    pairing: Pairing
    facets: dict[str, Facet]
    logprobs: Numbers
    errors: list[tuple[Call, Call, tuple[str, ...]]]
    incomparable: int
    """Calls with log-probabilities on both sides, but without a common token to compare."""
    parted: Parted


def lay_side_by_side(
    baseline: Evidence,
    candidate: Evidence,
    twin: ScenarioTrace | None,
    bound: float,
    aside: tuple[Collection[Concern], Collection[Concern]] = ((), ()),
) -> Comparison:
    """Compare every facet of every paired call. `bound` is the allowed difference of log-probabilities, in nats. `aside`: what checks
    found wrong on either side; it is not compared."""
    pairing = pair(baseline.trace, candidate.trace)
    again = pair(baseline.trace, twin).partner_of() if twin is not None else {}
    parted = partings.of_rounding(baseline, candidate, pairing.pairs)
    ours, theirs = _allowed_to_another(baseline), _allowed_to_another(candidate)
    allowed_to_another = {left.id: ours[left.id] | theirs[right.id] for left, right in pairing.pairs}
    trained_apart = _trained_apart(pairing.pairs)
    facets: dict[str, Facet] = defaultdict(Facet)
    numbers = Numbers()
    errors: list[tuple[Call, Call, tuple[str, ...]]] = []
    incomparable = 0
    for left, right in pairing.pairs:
        wrong = [covered(call, concerns) for call, concerns in zip((left, right), aside, strict=True)]
        met = tuple(why for why, by in BROKEN.items() if by(left, baseline) and by(right, candidate))
        if not any(wrong):
            _forms(left, right, again.get(left.id), facets, bound=bool(allowed_to_another[left.id]))
        if error_of(left) is not None or error_of(right) is not None:
            if not (given_up(left) and given_up(right)):
                one_sided = error_of(left) is None or error_of(right) is None
                errors.append((left, right, of_failure(left, one_sided=one_sided, met=met)))
            continue
        if any(None in rows for rows in wrong):
            continue
        trained = left.started_ns > trained_apart
        _outputs(
            left,
            right,
            again.get(left.id),
            bound=bound,
            parted=parted,
            facets=facets,
            aside=wrong[0] | wrong[1],
            overlaps=lambda method, left=left, right=right: (  # type: ignore[misc]
                overlaps(left, baseline, method) or overlaps(right, candidate, method)
            ),
            trained=trained,
            allowed_to_another=allowed_to_another,
        )
        before = numbers.facts
        _logprobs(left, right, bound, numbers, (Why.TRAINED,) if trained else ())
        incomparable += numbers.facts == before and _scored(left) and _scored(right)
    _partition(baseline, candidate, Evidence(twin, baseline.reference) if twin is not None else None, facets)
    return Comparison(
        pairing=pairing,
        facets=dict(facets),
        logprobs=numbers,
        errors=errors,
        incomparable=incomparable,
        parted=parted,
    )


def after_a_death(call: Call, evidence: Evidence) -> bool:
    """True if a server was killed before the call ended."""
    return any(kill.ended_ns < call.ended_ns for kill in evidence.calls("kill_server") if kill.error is None)


def on_a_broken_hop(call: Call, evidence: Evidence) -> bool:
    """True if a hop was broken while the call began."""
    before = [change for change in evidence.calls("break_hop") if change.ended_ns <= call.started_ns]
    return bool(before) and before[-1].request.get("fault") is not None


BROKEN = {Why.SERVER_DIED: after_a_death, Why.HOP_BROKEN: on_a_broken_hop}
"""What a scenario breaks, and whether a call met it."""


def _forms(left: Call, right: Call, again: Call | None, facets: dict[str, Facet], *, bound: bool) -> None:
    """`bound`: an engine gave a row of the call what another request was bound to, on either side."""
    for found in forms.compare(left, right, again):
        sides = found.baseline, found.candidate
        why = (Why.ALLOWED_TO_ANOTHER,) if bound and found.place.endswith(FOLLOWING) else found.why
        facets[found.facet].compare(found.place, sides, why, noisy=found.noisy, call=left)


def given_up(call: Call) -> bool:
    """True if the scenario itself stopped waiting for the call, which is no error of the stack."""
    return call.error is not None and call.error.blame == Blame.HARNESS


def covered(call: Call, concerns: Collection[Concern]) -> set[int | None]:
    """Rows of the call that the concerns are about; None among them: all of it."""
    return {row for of, row in concerns if of in (call.id, call.label)}


def _is_aside(place: str, rows: Collection[int | None]) -> bool:
    """True if the place is in one of the rows, or if it is in none and there are any."""
    row = row_of(place)
    return bool(rows) and (row is None or row in rows)


def _outputs(
    left: Call,
    right: Call,
    again: Call | None,
    *,
    bound: float,
    parted: Parted,
    facets: dict[str, Facet],
    aside: Collection[int | None] = (),
    overlaps: Callable[[str], bool],
    trained: bool,
    allowed_to_another: Parted,
) -> None:
    ours, theirs, twins = side_by_side(left, right, again)
    for name in {**ours, **theirs}:
        mine, other = ours.get(name, {}), theirs.get(name, {})
        facet = facets[name]
        if mine == other and not _truths(mine) and not _truths(other):
            facet.facts += len(mine)
            continue
        for place in {**mine, **other}:
            if _is_aside(place, aside):
                continue
            a, b = mine.get(place, NOT_THERE), other.get(place, NOT_THERE)
            facet.facts += 1
            if _same(a, b) or (name == BODIES and _near(place, a, b, bound)):
                continue
            if name in twins and _no_farther(a, b, twins[name].get(place, NOT_THERE)):
                facet.noisy += 1
                continue
            if explains(parted, left, place):
                facet.parted += 1
                continue
            reasons = [side.get(STOP_REASONS, {}).get(place) for side in (ours, theirs)]
            tokens = [side.get(TOKENS, {}).get(place) or [] for side in (ours, theirs)]
            asked = Asked(
                call=left,
                same_tokens=tokens[0] == tokens[1],
                cut=common_prefix(*tokens) == min(map(len, tokens)),
                stopped="length" not in reasons,
                aborted="abort" in reasons,
                tokens=len(tokens[0]),
                synced=overlaps("sync_weights")
                or (left.request.get("lora_adapter") is not None and overlaps("load_lora_adapter")),
                paused=overlaps("pause"),
                slept=overlaps("sleep"),
                trained=trained,
                allowed_to_another=explains(allowed_to_another, left, place),
            )
            why = of_place(name, place, a, b, asked)
            facet.differences.append(
                Difference(call=left, place=place, baseline=a, candidate=b, size=size_of(left, place), why=why)
            )


def _trained_apart(pairs: Sequence[tuple[Call, Call]]) -> float:
    """When the baseline's first step of training ended that gave other weights than the candidate's: a version is made of its
    weights (`TrainResult.version`)."""
    apart = [
        left.ended_ns
        for left, right in pairs
        if left.method == "train"
        if left.result is not None and right.result is not None
        if left.result["version"] != right.result["version"]
    ]
    return min(apart, default=math.inf)


def overlaps(call: Call, evidence: Evidence, method: str) -> bool:
    """True if a call of that method overlaps the call."""
    others = evidence.calls(method)
    return any(other.started_ns < call.ended_ns and call.started_ns < other.ended_ns for other in others)


def _allowed_to_another(evidence: Evidence) -> dict[int, frozenset[int]]:
    """Call id → rows to which an engine gave a token to which another request had been bound there, or that it left with none: the
    row may not have those before `min_tokens`."""
    binding = [(e.server, e.started_ns, frozenset(allowed)) for e in evidence.executions if (allowed := _allowed(e))]
    found: dict[int, frozenset[int]] = defaultdict(frozenset)
    for row in assignment(evidence).rows if binding else ():
        mine = (e for e in assignment(evidence).where(row) if not _allowed(e))
        if any(
            server == e.server
            and (e.ended_ns is None or started_ns < e.ended_ns)
            and (not allowed.isdisjoint(e.tokens) or allowed <= _forbidden(e))
            for e in mine
            for server, started_ns, allowed in binding
        ):
            found[row.call.id] |= {row.index}
    return found


def _allowed(execution: Execution) -> list[int]:
    """The tokens to which the request was bound; empty if to none."""
    return execution.sampling_params.get("allowed_token_ids") or []


def _forbidden(execution: Execution) -> set[int]:
    """Tokens that the request's first one may not be: those that would stop it."""
    params = execution.sampling_params
    return set(params.get("stop_token_ids") or ()) if params.get("min_tokens") else set()


def _truths(values: dict[str, Any]) -> bool:
    return any(isinstance(value, bool) for value in values.values())


def _same(left: Any, right: Any) -> bool:
    """Equal, and of one JSON type: true is not 1."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _near(place: str, left: Any, right: Any, bound: float) -> bool:
    """True for two log-probabilities in an OpenAI-style body that differ by at most `bound`."""
    numbers = isinstance(left, float) and isinstance(right, float)
    return numbers and "logprob" in place and abs(left - right) <= bound


def _no_farther(baseline: Any, candidate: Any, twin: Any) -> bool:
    """True if the baseline's own twin parts from it too, and no later than the candidate does."""
    if _same(baseline, twin):
        return False
    if all(isinstance(x, list) for x in (baseline, candidate, twin)) or all(
        isinstance(x, str) for x in (baseline, candidate, twin)
    ):
        return common_prefix(baseline, candidate) >= common_prefix(baseline, twin)
    return True


def _scored(call: Call) -> bool:
    result = call.result or {}
    return bool(
        call.method in LISTS
        and deterministic(call)
        and any(result.get("response_ids") or ())
        and any(result.get("response_logprobs") or ())
    )


def _logprobs(left: Call, right: Call, bound: float, numbers: Numbers, why: tuple[str, ...]) -> None:
    facts, differing = deltas(left, right)
    numbers.facts += facts
    for delta in differing:
        if math.isinf(delta.size):
            numbers.one_sided += 1
            numbers.unasked += (left.request.get("sampling_params") or {}).get("logprobs") is None
        else:
            numbers.largest = max(numbers.largest, delta.size)
        if delta.size > bound:
            place = f"row {delta.row}"
            numbers.beyond.append(
                Difference(
                    call=left,
                    place=place,
                    baseline={"token": delta.position, "logprob": delta.left},
                    candidate={"token": delta.position, "logprob": delta.right},
                    size=size_of(left, place),
                    why=why,
                )
            )


def _partition(baseline: Evidence, candidate: Evidence, twin: Evidence | None, facets: dict[str, Facet]) -> None:
    """Of sessions that both were asked for: what one alone was asked says `calls.paired`."""
    asked = _sessions(baseline) & _sessions(candidate)
    ours, theirs = partition(baseline, asked), partition(candidate, asked)
    twins = partition(twin, asked) if twin is not None and (ours or theirs) else {}
    failed = {
        f"session {json.dumps(r.session)}" for one in (baseline, candidate) for r in rows(one) if r.state == "failed"
    }
    for session in {**ours, **theirs}:
        a, b = ours.get(session, NOT_THERE), theirs.get(session, NOT_THERE)
        if NOT_THERE in (a, b) and session in failed:
            continue  # no engine took it there: `outputs.errors`
        why = () if NOT_THERE in (a, b) else (Why.OTHER_SERVERS,)
        noisy = session in twins and twins[session] != a
        facets[PARTITION].compare(session, (a, b), why, noisy=noisy)


def _sessions(evidence: Evidence) -> set[str]:
    return {json.dumps(row.session) for row in rows(evidence) if row.session is not None}


def partition(evidence: Evidence, among: Collection[str]) -> dict[str, str]:
    """Which of these sessions share their servers: session → the first session on the same servers.

    Two stacks that spread the same sessions alike give the same mapping, though they number their servers differently.
    """
    if not among:
        return {}
    served = dict(_servers(evidence))
    first: dict[frozenset[str], str] = {}
    return {
        f"session {session}": f"with session {first.setdefault(servers, session)}"
        for session, servers in sorted(served.items())
        if session in among
    }


def _servers(evidence: Evidence) -> Iterator[tuple[str, frozenset[str]]]:
    found = assignment(evidence)
    by_session: dict[str, set[str]] = defaultdict(set)
    for row in found.rows:
        if row.session is not None:
            by_session[json.dumps(row.session)].update(execution.server for execution in found.where(row))
    for session, servers in by_session.items():
        if servers:
            yield session, frozenset(servers)
