"""Judging fails closed: anything that could not be judged is red, and names who must act."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.base import Check, failed, passed, untestable
from harness.checks.refusals import REFUSALS
from harness.contract.capability import Capability
from harness.contract.errors import Blame
from harness.judging import exercise, judge, takes
from harness.records.recording import CallError, ScenarioTrace
from harness.records.reference import (
    DecodeRequest,
    NextRequest,
    NoiseRequest,
    RenderRequest,
    Text,
    Tokens,
    UnansweredQuery,
)
from harness.records.verdict import Cause, Conformance, Verdict
from tests import recordings, traces

CALL = traces.generate([[1, 2]], [[3]])
EMPTY = traces.FakeReference().asked([])


def check(judge_it, name="a_check", queries=lambda evidence: ()) -> Check:
    return Check(name=name, fault="f", source="s", judge=judge_it, queries=queries)


def verdict_of(judge_it, *, queries=lambda evidence: (), reference=EMPTY, **about) -> Verdict:
    """The verdict of a check with this function, without those of the checks of every scenario."""
    scenario = recordings.declared(checks=(check(judge_it, queries=queries),))
    return judge.judge(scenario, traces.trace(CALL, **about), reference)[0]


def test_a_correct_recording_passes_every_check_and_those_of_every_scenario():
    events = list(recordings.events())
    trace = ScenarioTrace(
        header=recordings.header("stack:new"),
        scenario="module.test_it",
        take=1,
        calls=tuple(e for e in events if type(e).__name__ == "Call"),
        observations=tuple(e for e in events if type(e).__name__ == "Observation"),
        end=events[-1],
    )
    verdicts = judge.judge(recordings.declared(), trace, EMPTY)
    assert {v.check: v.status for v in verdicts} == dict.fromkeys(
        ["sticky_sessions", "all_complete", *(check.name for check in judge.ALWAYS if check is not REFUSALS)], "pass"
    ), "no server refused anything"
    assert all(v.facts > 0 and v.blame is None and v.target == "stack:new" for v in verdicts)


def test_a_finding_becomes_a_verdict_with_everything_that_it_said():
    found = verdict_of(lambda evidence: failed(3, "wrong order", [{"row": 1}], worst=2.0))
    assert (found.status, found.blame, found.reason, found.facts) == ("fail", Blame.STACK, "wrong order", 3)
    assert (found.evidence, found.numbers, found.fault, found.source) == ([{"row": 1}], {"worst": 2.0}, "f", "s")
    assert found.red
    assert found.next_step


def test_a_pass_over_no_facts_is_untestable():
    found = verdict_of(lambda evidence: passed(0))
    assert (found.status, found.blame) == (Conformance.UNTESTABLE, Blame.HARNESS)
    assert "judged nothing" in found.reason
    assert found.red


def test_an_exception_in_a_check_is_untestable_and_shown_with_its_place():
    def broken(evidence):
        return passed(len(evidence.trace.calls) // 0)

    found = verdict_of(broken)
    assert (found.status, found.blame) == (Conformance.UNTESTABLE, Blame.HARNESS)
    assert found.reason == "check a_check raised ZeroDivisionError"
    assert "division" in found.evidence[0]["exception"]
    assert any("in broken" in frame and "test_judge.py" in frame for frame in found.evidence[0]["traceback"])
    assert not any("/" in frame.partition(" in ")[0] for frame in found.evidence[0]["traceback"])


def test_an_answer_that_was_never_given_is_untestable():
    found = verdict_of(
        lambda evidence: passed(len(evidence.reference.next(NextRequest(version=0, prompt=[1])).logprobs))
    )
    assert (found.status, found.blame) == (Conformance.UNTESTABLE, Blame.HARNESS)
    assert "never asked" in found.reason


def test_a_finding_of_the_instruments_keeps_its_blame():
    found = verdict_of(lambda evidence: untestable("no memory", Blame.ENVIRONMENT))
    assert (found.status, found.blame, found.reason) == (Conformance.UNTESTABLE, Blame.ENVIRONMENT, "no memory")


def test_only_a_check_of_every_scenario_may_find_nothing_of_its_kind(monkeypatch):
    silent = check(lambda evidence: None, "silent")
    scenario = recordings.declared(checks=(check(lambda evidence: passed(1)),))
    monkeypatch.setattr(judge, "ALWAYS", (silent,))
    assert [v.check for v in judge.judge(scenario, traces.trace(CALL), EMPTY)] == ["a_check"]
    [own] = judge.judge(recordings.declared(checks=(silent,)), traces.trace(CALL), EMPTY)
    assert own.status == Conformance.UNTESTABLE


@pytest.mark.parametrize(
    ("blame", "status"), [("stack", "fail"), ("environment", "untestable"), ("nobody", "untestable")]
)
def test_a_scenario_that_was_not_driven_to_its_end_passes_nothing(blame, status):
    error = CallError(kind="StackDied", message="engine 1 is gone", blame=blame)
    trace = traces.trace(CALL, outcome="failed", end_error=error)
    verdicts = judge.judge(recordings.declared(), trace, EMPTY)
    assert [v.check for v in verdicts] == ["sticky_sessions", "all_complete"]
    assert {v.status for v in verdicts} == {status}
    assert {v.reason for v in verdicts} == {"could not be driven: StackDied: engine … is gone"}
    assert {v.blame for v in verdicts} == {Blame(blame) if blame in set(Blame) else Blame.HARNESS}
    assert verdicts[0].evidence[0]["message"] == "engine 1 is gone"


def test_what_the_model_lacks_is_no_red_of_the_stack():
    error = CallError(kind="ModelLacks", message="the model has not tokens of one byte each", blame="setup")
    trace = traces.trace(CALL, outcome="failed", end_error=error)
    verdicts = judge.judge(recordings.declared(), trace, EMPTY)
    said = {(v.status, v.cause, v.reason, v.red) for v in verdicts}
    assert said == {("missing", Cause.NOT_HERE, "is untestable here: the model has not tokens of one byte each", False)}


def test_what_to_ask_depends_on_what_was_answered(monkeypatch):
    """A chat prompt is rendered first, then scored: the driver asks in rounds until no answer is missing. Every scenario asks for
    the noise."""
    asked = RenderRequest(messages=[{"role": "user", "content": "hi"}])

    def two_rounds(evidence):
        yield asked
        yield NextRequest(version=0, prompt=evidence.reference.render(asked.messages))

    def raising(evidence):
        yield DecodeRequest(tokens=[1], skip_special_tokens=True)
        raise RuntimeError

    monkeypatch.setattr(
        judge, "ALWAYS", (check(lambda e: None, "always", lambda e: [NextRequest(version=1, prompt=[])]),)
    )
    scenario = recordings.declared(
        checks=(check(lambda e: passed(1), "two", two_rounds), check(lambda e: passed(1), "raising", raising))
    )
    book = traces.FakeReference()
    others = [DecodeRequest(tokens=[1], skip_special_tokens=True), NextRequest(version=1, prompt=[])]
    first = judge.queries(scenario, traces.trace(CALL), book.asked([]))
    assert first == [NoiseRequest(), asked, *others]
    book.set(asked, Tokens(tokens=[5]))
    second = judge.queries(scenario, traces.trace(CALL), book.asked(first))
    assert second == [NoiseRequest(), asked, NextRequest(version=0, prompt=[5]), *others]
    assert isinstance(Text(text=""), Text)
    with pytest.raises(UnansweredQuery):
        book.asked([]).render(asked.messages)


def test_a_lacking_capability_is_missing_for_each_check_and_red_only_in_a_comparison():
    scenario = recordings.declared(needs=frozenset({Capability.SLEEP, Capability.SAMPLE}))
    verdicts = judge.missing(scenario, "stack:new", "disaggregated", [Capability.SAMPLE])
    assert [(v.status, v.check, v.reason) for v in verdicts] == [
        ("missing", "sticky_sessions", "does not declare sleep"),
        ("missing", "all_complete", "does not declare sleep"),
    ]
    assert not any(v.red for v in verdicts)
    assert judge.missing(scenario, "stack:new", "disaggregated", list(Capability)) == []


def test_a_declared_capability_that_nothing_exercised_with_success_is_red():
    calls = [
        traces.call("pause", {"mode": "keep"}, phase="clean_room"),
        traces.call("health", phase="clean_room"),
        traces.call("pause", {"mode": "abort"}),
        traces.call("resume"),
        traces.call("prepare_weight_sync"),
        traces.call("sleep", error=traces.error()),
        traces.call("wake_up", {"tags": ["weights"]}),
        traces.generate([], [[1]], messages=[[{"role": "user", "content": "x"}]]),
    ]
    seen = exercise.exercised(traces.trace(*calls))
    assert seen == {Capability.PAUSE_ABORT, Capability.WAKE_UP_TAGS, Capability.GENERATE_MESSAGES}
    declared = [*seen, Capability.PAUSE_KEEP, Capability.SLEEP]
    verdicts = exercise.unexercised("stack:new", "all", 1, declared, seen)
    assert [v.scenario for v in verdicts] == ["capabilities.pause_keep", "capabilities.sleep"]
    assert all(v.red and v.blame == Blame.HARNESS for v in verdicts)


def test_red_in_any_take_is_red_and_says_in_how_many():
    good = verdict_of(lambda evidence: passed(2))
    bad = verdict_of(lambda evidence: failed(2, "lost a row", [{"row": 1}]))
    [merged] = takes.merge([[good]] * 7 + [[bad]] * 3)
    assert (merged.status, merged.reason, merged.red) == ("fail", "lost a row", True)
    assert merged.evidence == [{"row": 1}, {"takes": "fail in 3 of 10 takes"}]
    assert takes.merge([[good]]) == [good]
    [always] = takes.merge([[good], [good]])
    assert msgspec.structs.replace(always, takes=1, alike=1) == good
    assert (merged.takes, merged.alike, always.takes, always.alike) == (10, 3, 2, 2)
