"""What the engines did is compared too: requests per server, attempts, concurrency, seconds and the order of control calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from harness.checks.base import Evidence, failed
from harness.judging.causes import Why
from harness.judging.engine_facets import ATTEMPTS, CONCURRENCY, ORDER, PARAMETERS, REQUESTS, SECONDS, compare
from harness.judging.open_differences import by_cause
from harness.judging.pace import LEAST_PAIRS
from harness.judging.pairing import pair
from harness.judging.parity import Judged
from harness.judging.parity import compare as verdicts_of
from harness.judging.sides import Facet
from harness.records.recording import Call, Observation, ScenarioTrace
from harness.records.verdict import UNEXPLAINED, Conformance, Parity, Verdict
from tests import traces
from tests.miniature import bench
from tests.test_parity import BOOK, SCENARIO, verdict

SECOND = 10**9
TOKENS = list(range(20, 30))


def batch(
    spread: Sequence[str], *, gap_s: float = 0.0, from_s: float = 0.0, session: str | None = None, **about: Any
) -> list[Call | Observation]:
    """A call with one row per server in `spread`, each of one second, started `gap_s` apart."""
    start, prompts = int(from_s * SECOND) + 10, [[5, row] for row in range(len(spread))]
    made: list[Call | Observation] = []
    for row, server in enumerate(spread):
        at = start + 1 + int(row * gap_s * SECOND)
        made += traces.executed(prompts[row], TOKENS, server=server, from_ns=at, step_ns=SECOND // 11)
    answers = None if "error" in about else [TOKENS] * len(spread)
    about = {
        "started_ns": start,
        "ended_ns": start + 100 * SECOND,
        "session_ids": [session] * len(spread) if session else None,
    } | about
    return [traces.generate(prompts, answers, params={"temperature": 0.0}, **about), *made]


def control(
    method: str, steps: Iterable[tuple[str, dict[str, Any]]], *, at_s: float = 0.0, servers=("server-0", "server-1")
):
    """A control call during which each server is told these steps."""
    at = int(at_s * SECOND) + 10
    seen = [
        traces.observation("control", server, at + 1 + number, op=op, arguments=arguments, error=None)
        for server in servers
        for number, (op, arguments) in enumerate(steps)
    ]
    return [traces.call(method, {"version": 1}, started_ns=at, ended_ns=at + SECOND), *seen]


KILLED = [traces.call("kill_server", {"server": "server-1"}, started_ns=11, ended_ns=12)]
CLEAN_ROOM = traces.call("digests", phase="clean_room", started_ns=1, ended_ns=5)
CANARY = traces.executed([1], [2], from_ns=2)


def trace(*parts: Call | Observation, **about: Any) -> ScenarioTrace:
    calls = [part for part in parts if isinstance(part, Call)]
    return traces.trace(
        CLEAN_ROOM, *calls, observations=[*CANARY, *(p for p in parts if isinstance(p, Observation))], **about
    )


def facets(baseline: ScenarioTrace, candidate: ScenarioTrace, twin: ScenarioTrace | None = None) -> dict[str, Facet]:
    mirrored = compare(
        Evidence(candidate, BOOK), Evidence(baseline, BOOK), twin and candidate, pair(candidate, baseline)
    )
    found = compare(Evidence(baseline, BOOK), Evidence(candidate, BOOK), twin, pair(baseline, candidate))
    if twin is None:
        without = [{name: causes for name, causes in why(one).items() if name != SECONDS} for one in (found, mirrored)]
        assert without[0] == without[1], "it does not matter which side is which, except that one is faster"
    return found


def why(found: dict[str, Facet]) -> dict[str, list[str]]:
    """Facet → causes of its differences, without facets that have none."""
    return {
        name: sorted({str(one) for d in facet.differences for one in d.why or (UNEXPLAINED,)})
        for name, facet in found.items()
        if facet.differences
    }


EVEN, ONE = ["server-0", "server-1"] * 32, ["server-0"] * 64
REFUSED = {"error": traces.error(), "ended_ns": SECOND // 10}
RESET = [("reset_prefix_cache", {})]
PAUSE = [("pause_generation", {"mode": "keep"})]


@pytest.mark.parametrize(
    ("baseline", "candidate", "causes"),
    [
        (batch(EVEN), batch(EVEN[:30] + EVEN[:1] * 4 + EVEN[:30]), {}),
        (batch(EVEN), batch(ONE), {REQUESTS: [Why.OTHER_SPREAD], CONCURRENCY: [Why.OTHER_SPREAD]}),
        (batch(["server-0"] * 2), batch(["server-0", "server-1"]), {}),
        (batch(EVEN, session="a"), batch(ONE, session="a"), {}),
        (batch(EVEN[:4]), batch(EVEN[:4])[:1] + batch(EVEN[:8])[1:], {REQUESTS: [UNEXPLAINED]}),
        (batch(EVEN[:2]), batch(EVEN[:2]) + batch(EVEN[:2])[1:], {one: [UNEXPLAINED] for one in (ATTEMPTS, REQUESTS, CONCURRENCY)}),
        (
            batch(EVEN[:1]) + KILLED,
            batch(EVEN[:1]) + batch(EVEN[:1], from_s=0.01)[1:] + KILLED,
            {ATTEMPTS: [Why.SERVER_DIED], REQUESTS: [Why.SERVER_DIED], CONCURRENCY: [Why.SERVER_DIED]},
        ),
        (batch(EVEN[:2]), batch(EVEN[:2])[:1], {ATTEMPTS: [UNEXPLAINED], REQUESTS: [UNEXPLAINED]}),
        (batch(EVEN[:1], **REFUSED), batch(EVEN[:1], **REFUSED)[:1], {ATTEMPTS: [Why.REFUSED_ELSEWHERE]}),
        (batch(EVEN[:2], **REFUSED), batch(EVEN[:2], **REFUSED)[:1], {}),
        (batch(EVEN[:1], **REFUSED), batch(EVEN[:1], **REFUSED) + batch(EVEN[:1], from_s=0.01)[1:], {ATTEMPTS: [Why.ASKED_AGAIN]}),
        (batch(EVEN[:4]), batch(EVEN[:4], gap_s=1.2), {CONCURRENCY: [Why.ONE_BY_ONE]}),
        (batch(EVEN[:8]), batch(EVEN[:8], gap_s=0.4), {CONCURRENCY: [Why.STAGGERED]}),
        (batch(EVEN[:8]), batch(EVEN[:8], gap_s=0.1), {}),
        (batch(EVEN[:4], ended_ns=SECOND), batch(EVEN[:4], ended_ns=4 * SECOND), {}),
        (batch(EVEN[:4], ended_ns=SECOND), batch(EVEN[:4], ended_ns=9 * SECOND), {SECONDS: [UNEXPLAINED]}),
        (
            batch(EVEN[:8], ended_ns=SECOND),
            batch(EVEN[:8], gap_s=0.9, ended_ns=9 * SECOND),
            {CONCURRENCY: [Why.STAGGERED], SECONDS: [Why.STAGGERED]},
        ),
        (
            batch(EVEN[:8], ended_ns=SECOND),
            batch(EVEN[:8], gap_s=0.4, ended_ns=9 * SECOND),
            {CONCURRENCY: [Why.STAGGERED], SECONDS: [UNEXPLAINED]},
        ),
        (batch([], **REFUSED), batch([], error=traces.error(), ended_ns=30 * SECOND), {SECONDS: [Why.SLOW_TO_FAIL]}),
        (batch([], **REFUSED), batch([], error=traces.error(), ended_ns=SECOND), {}),
        (control("sleep", [("sleep", {})]), control("sleep", [*RESET, ("sleep", {})]), {ORDER: [Why.CACHE_RESET_AT_SLEEP]}),
        (control("resume", []), control("resume", RESET), {ORDER: [Why.CACHE_RESET]}),
        (control("sleep", [("sleep", {})]), control("sleep", [("sleep", {"level": 2})]), {ORDER: [Why.OTHER_ARGUMENTS]}),
        (control("sleep", [("sleep", {})]), control("sleep", [("sleep", {"level": 1})]), {}),
        (control("pause", [*RESET, *PAUSE]), control("pause", [*PAUSE, *RESET]), {ORDER: [Why.OTHER_ORDER]}),
        (control("sync_weights", []), control("sync_weights", PAUSE), {ORDER: [Why.PAUSE_WITHIN]}),
        (control("sync_weights", PAUSE), control("sync_weights", [*PAUSE, ("wake_up", {})]), {ORDER: [Why.SLEEP_WITHIN]}),
        (
            control("sync_weights", [("collective_rpc", {"method": "load"})] * 3),
            control("sync_weights", [("start_weight_update", {}), ("update_weights", {})]),
            {ORDER: [Why.SYNC_STAGES]},
        ),
        (control("pause", PAUSE), control("pause", PAUSE) + control("x", RESET, at_s=9)[1:], {ORDER: [Why.CACHE_RESET]}),
        (control("resume", []), control("resume", [("collective_rpc", {"method": "x"})]), {ORDER: [UNEXPLAINED]}),
        (control("pause", PAUSE), control("pause", PAUSE, servers=["server-0"]), {ORDER: [Why.PAUSE_WITHIN]}),
        (
            control("pause", PAUSE) + control("reset_prefix_cache", RESET),
            control("pause", PAUSE) + control("reset_prefix_cache", []),
            {},
        ),
    ],
)  # fmt: skip
def test_the_cause_of_what_engines_did_otherwise(baseline, candidate, causes):
    assert why(facets(trace(*baseline), trace(*candidate))) == causes
    alike = facets(trace(*baseline), trace(*baseline), trace(*baseline, take=2))
    assert not why(alike)
    assert not any(facet.noisy for facet in alike.values())


QUICK, SLOW = {"ended_ns": SECOND // 10}, {"ended_ns": 30 * SECOND}
FAILS = {"error": traces.error()}


@pytest.mark.parametrize(
    ("baseline", "candidate", "causes"),
    [
        (SLOW, QUICK, []),
        (QUICK, SLOW, [UNEXPLAINED]),
        (SLOW | FAILS, QUICK | FAILS, [Why.QUICK_TO_FAIL]),
        (SLOW, QUICK | FAILS, [Why.QUICK_TO_FAIL]),
        (SLOW | FAILS, QUICK, []),
        (QUICK | FAILS, SLOW | FAILS, [Why.SLOW_TO_FAIL]),
        (QUICK, SLOW | FAILS, [Why.SLOW_TO_FAIL]),
        (QUICK | FAILS, SLOW, [UNEXPLAINED]),
    ],
)
def test_a_faster_candidate_is_no_difference_unless_its_calls_fail_sooner(baseline, candidate, causes):
    found = facets(trace(*batch([], **baseline)), trace(*batch([], **candidate)))
    assert why(found).get(SECONDS, []) == causes
    assert found[SECONDS].faster == (not causes)


def test_one_call_that_fails_sooner_takes_the_praise_from_all_of_its_kind():
    """The group of failing calls holds a pair in which the candidate is right, and is faster."""
    slow = [traces.generate([[n]], [[1]], started_ns=10, **SLOW, **FAILS) for n in range(3)]
    quick = [traces.generate([[n]], [[1]], started_ns=10, **QUICK, **(FAILS if n == 1 else {})) for n in range(3)]
    assert why(facets(trace(*slow), trace(*quick)))[SECONDS] == [Why.QUICK_TO_FAIL]


def test_a_faster_candidate_needs_no_entry():
    def judged(seconds: int, **about: Any) -> Judged:
        taken = trace(*batch(EVEN[:2], ended_ns=seconds * SECOND), **about)
        return Judged(evidence=Evidence(taken, BOOK), verdicts=[verdict(Conformance.PASS)])

    def compared(ours: int, theirs: int) -> Verdict:
        found = verdicts_of(SCENARIO, judged(ours), judged(theirs, target="stack:new"), None, [])
        return next(v for v in found if v.check == SECONDS)

    faster, slower = compared(30, 1), compared(1, 30)
    assert (faster.status, faster.reason) == (Parity.PARITY, "differs only where the candidate is several times faster")
    assert not by_cause([faster], [])
    assert [one.cause for one in by_cause([slower], [])] == [UNEXPLAINED]


def test_calls_that_a_pause_holds_have_no_pace():
    def held(seconds: float) -> ScenarioTrace:
        pause, resume = (traces.call(m, started_ns=at, ended_ns=at + 1) for m, at in (("pause", 100), ("resume", 200)))
        return trace(*batch(EVEN[:2], ended_ns=int(seconds * SECOND)), pause, resume)

    assert SECONDS not in why(facets(held(1), held(50)))


def several(seconds: float) -> list[Call]:
    return [
        traces.generate([[n]], [[1]], started_ns=10, ended_ns=10 + int(seconds * SECOND)) for n in range(LEAST_PAIRS)
    ]


def test_short_requests_are_compared_if_there_are_enough():
    assert SECONDS in why(facets(trace(*several(0.02)), trace(*several(0.2))))
    assert SECONDS not in why(facets(trace(*several(0.002)), trace(*several(0.05))))
    assert SECONDS not in why(facets(trace(*several(0.02)[:9]), trace(*several(0.2)[:9])))


def test_a_machine_on_which_the_engines_are_slow_as_well_is_no_difference_of_the_stacks():
    def taken(seconds: int, step_ns: int) -> ScenarioTrace:
        return trace(*several(seconds), *traces.executed([5], TOKENS, from_ns=20, step_ns=step_ns))

    assert SECONDS not in why(facets(taken(1, SECOND // 10), taken(10, SECOND)))
    assert SECONDS in why(facets(taken(1, SECOND // 10), taken(10, SECOND // 10)))


@pytest.mark.parametrize(
    ("facet", "baseline", "candidate", "twin"),
    [
        (REQUESTS, batch(EVEN), batch(ONE), batch(ONE)),
        (ATTEMPTS, batch(EVEN[:2]), batch(EVEN[:2]) + batch(EVEN[:2])[1:], batch(EVEN[:2]) + batch(EVEN[:2])[1:]),
        (CONCURRENCY, batch(EVEN[:4]), batch(EVEN[:4], gap_s=1.2), batch(EVEN[:4], gap_s=1.2)),
        (SECONDS, *(batch([], error=traces.error(), ended_ns=seconds * SECOND) for seconds in (1, 30, 60))),
        (ORDER, control("pause", PAUSE), control("pause", RESET), control("pause", [])),
    ],
)  # fmt: skip
def test_what_the_baseline_does_otherwise_in_its_second_take_is_noise(facet, baseline, candidate, twin):
    assert facet in why(facets(trace(*baseline), trace(*candidate)))
    assert facet not in why(facets(trace(*baseline), trace(*candidate), trace(*twin, take=2)))


def test_what_a_failed_check_is_about_is_left_out_and_the_rest_is_not():
    wrong, other = batch(EVEN[:1]), batch(EVEN[:2], from_s=200)
    doubled = batch(EVEN[:2], from_s=200)[1:]
    baseline = trace(*wrong, *other)
    candidate = trace(wrong[0], *other, *doubled, target="stack:new")
    finding = failed(1, "no engine ran it", [{"call": wrong[0].id}])
    red = [verdict(Conformance.FAIL, reason=finding.reason, concerns=finding.concerns)]
    judged = Judged(evidence=Evidence(candidate, BOOK), verdicts=red, own=red)
    right = Judged(evidence=Evidence(baseline, BOOK), verdicts=[verdict(Conformance.PASS)])
    found = {v.check: v for v in verdicts_of(SCENARIO, right, judged, None, [])}
    assert {v.status for check, v in found.items() if check.startswith("engines.")} == {Parity.OPEN}
    assert found[ATTEMPTS].numbers["differing"] == len(EVEN[:2])
    assert {e["call"] for e in found[ATTEMPTS].evidence} == {"generate"}
    assert found[REQUESTS].evidence == [{"place": "requests in all", "baseline": 2, "candidate": 4}]


@pytest.mark.parametrize(
    ("late_s", "kinds", "causes"),
    [
        (0.5, ["sleep"], {}),
        (1.5, ["sleep"], {}),
        (2.5, ["sleep"], {}),
        (2.5, ["reset_prefix_cache", "sleep"], {ORDER: [Why.CACHE_RESET_AT_SLEEP]}),
    ],
)
def test_what_servers_do_after_a_call_that_failed_at_one_of_them_belongs_to_that_call(late_s, kinds, causes):
    def stack(kinds: list[str], late_s: float) -> ScenarioTrace:
        """A sleep that fails at one server, while the other one's last step comes late; and one that succeeds."""
        steps = [(kind, {"level": 1} if kind == "sleep" else {}) for kind in kinds]
        broken = control("sleep", steps[:-1], servers=["server-1"])
        broken[0] = traces.call("sleep", {"level": 1}, error=traces.error(), started_ns=10, ended_ns=10 + SECOND)
        op, arguments = steps[-1]
        at = int(late_s * SECOND)
        late = traces.observation("control", "server-1", at, op=op, arguments=arguments, error=None)
        return trace(*broken, late, *control("sleep", steps, at_s=2))

    assert why(facets(stack(["sleep"], 0.5), stack(kinds, late_s))) == causes


def a_run(*pauses_s: float, resumes: bool = True) -> ScenarioTrace:
    """A trainer's run of two steps, one sync in each. It pauses the engines `pauses_s` after the scenario has told it to go on."""
    parts = control("start_trainer_run", [])
    for step, pause_s in enumerate(pauses_s):
        at_s = 10 * step + 2
        parts += control("trainer_goes_on", [], at_s=at_s)
        parts += control("pause", PAUSE, at_s=at_s + pause_s)[1:]
        told = {"what": "weights"}
        parts.append(
            traces.call("trainer_wants", {}, told, started_ns=(at_s + 4) * SECOND, ended_ns=(at_s + 5) * SECOND)
        )
        parts += control("sync_weights", [("collective_rpc", {"method": "load"})], at_s=at_s + 6)
        parts += control("pause", [("resume_generation", {})] if resumes else [], at_s=at_s + 8)[1:]
    return trace(*parts, *control("end_trainer_run", [], at_s=30))


def test_a_trainer_of_the_stack_makes_its_steps_in_whichever_call_it_is():
    assert why(facets(a_run(0.5, 0.5), a_run(0.5, 4.5))) == {}, "later, but before the sync"
    found = facets(a_run(0.5, 0.5), a_run(0.5, 0.5, resumes=False))
    assert why(found) == {ORDER: [Why.PAUSE_WITHIN]}
    assert [d.place for d in found[ORDER].differences] == ["a trainer's run"]


@pytest.mark.parametrize(
    ("ended", "last", "causes"),
    [
        (None, "length", {REQUESTS: [UNEXPLAINED]}),
        (None, "abort", {REQUESTS: [Why.INTERRUPTED]}),
        (None, None, {REQUESTS: [Why.INTERRUPTED]}),
        ("NotDoneError: the caller could not do it", "length", {}),
    ],
)
def test_how_much_a_trainers_run_asks_for_before_an_error_ends_it_is_a_matter_of_time(ended, last, causes):
    """What a sync aborts is asked again, on a stack whose sync aborts."""

    def stack(rollouts: int) -> ScenarioTrace:
        wants = traces.call(
            "trainer_wants", {}, {"what": "nothing", "ended": ended}, started_ns=20, ended_ns=90 * SECOND
        )
        at = [(0 if number % 2 else 1, number * SECOND) for number in range(1, rollouts + 1)]
        ran = [
            seen
            for server, from_ns in at
            for seen in traces.executed(
                [5, from_ns // SECOND],
                [6],
                server=f"server-{server}",
                from_ns=from_ns,
                reason="length" if from_ns < 5 * SECOND else last,
            )
        ]
        return trace(*control("start_trainer_run", []), wants, *ran)

    assert why(facets(stack(4), stack(6))) == causes


def test_nothing_seen_is_nothing_compared():
    calls = [part for part in batch(EVEN[:2]) if isinstance(part, Call)]
    blind = traces.trace(*calls)
    assert set(facets(blind, trace(*batch(EVEN[:2])))) == {SECONDS}
    idle = facets(trace(), trace())
    assert [facet.facts for facet in idle.values()] == [0] * len(idle)


FAULTS = {
    ("one_server_gets_all/without_session", "routing.test_a_batch_without_sessions_is_spread"): {REQUESTS: [Why.OTHER_SPREAD]},
    ("executed_twice/always", "control_plane.test_control_calls_reach_every_server"): {
        ATTEMPTS: [UNEXPLAINED], CONCURRENCY: [UNEXPLAINED], REQUESTS: [UNEXPLAINED],
    },
    ("sleeps_to_sync", "weight_sync.test_there_and_back_again"): {ORDER: [Why.SLEEP_WITHIN]},
    ("control_argument_dropped", "control_plane.test_reset_prefix_cache_takes_its_argument_along"): {ORDER: [Why.OTHER_ARGUMENTS]},
}  # fmt: skip
"""(fault, scenario) → facet → causes that it must show."""


def test_the_miniatures_faults_are_seen_and_two_correct_takes_are_alike(tmp_path):
    def driven(scenario: str) -> ScenarioTrace:
        miniature.drive(scenario)
        return miniature.trace(scenario)

    with bench(tmp_path) as miniature:
        for (fault, scenario), causes in FAULTS.items():
            right = [driven(scenario) for _ in range(2)]
            miniature.inject(fault)
            broken = driven(scenario)
            assert miniature.inject(None), fault
            assert not why(facets(right[0], right[1])), scenario
            assert (
                why(compare(Evidence(right[0], BOOK), Evidence(broken, BOOK), right[1], pair(right[0], broken)))
                == causes
            )


def test_a_parameter_that_only_one_stack_fills_in_is_a_cause_of_its_own():
    def asked(*params: dict[str, Any]) -> ScenarioTrace:
        prompts = [[5, row] for row in range(len(params))]
        made = [traces.executed(prompts[row], TOKENS, params=one, from_ns=20 + row) for row, one in enumerate(params)]
        call = traces.generate(
            prompts, [TOKENS] * len(params), params={"temperature": 0.0}, started_ns=10, ended_ns=SECOND
        )
        return trace(call, *(one for several in made for one in several))

    given = {"max_tokens": 10, "temperature": 0, "stop": ["a"]}
    left = asked({**given, "seed": 1}, {**given, "seed": 2})
    right = asked({**given, "seed": 2, "temperature": 0.0}, {**given, "seed": 1, "kind": "FINAL", "stop": []})
    found = facets(left, right)[PARAMETERS]
    assert {d.place: (d.baseline, d.candidate) for d in found.differences} == {
        "kind": ("(not there)", '"FINAL"'),
        "stop": ('["a"]', '["a"], []'),
    }, "the order of rows does not count, and 0 is 0.0"
    assert [d.why for d in found.differences] == [(f"{Why.PARAMETER}:{name}",) for name in ("kind", "stop")]
    assert facets(left, left)[PARAMETERS].facts == 4
