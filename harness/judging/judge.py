"""Checks × one scenario of one recording → conformance verdicts. Pure: no live stack, no oracle, only their records."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from harness.checks.always import ALWAYS
from harness.checks.base import Check, Evidence, Finding, untestable
from harness.checks.instruments import blind
from harness.contract.capability import Capability
from harness.contract.errors import Blame, ModelLacks
from harness.judging.consequences import with_causes
from harness.records.recording import ENUMERATED, CallError, ScenarioTrace
from harness.records.reference import Query, ReferenceBook, UnansweredQuery
from harness.records.verdict import Cause, Conformance, Verdict
from harness.suite.scenario import Scenario

NEXT_STEP = {
    Blame.STACK: "compare the evidence with the rule's source; mend the stack, or enter the difference in the ledger",
    Blame.SETUP: "change what was asked for on the command line",
    Blame.ENVIRONMENT: "run `parity doctor`, free what it names, and run again",
    Blame.HARNESS: "nothing is known about the stack: mend the scenario, the check or the instrument, and run again",
    Blame.DEPENDENCY: "look for the error in the dependency's own tracker; the stack may not be at fault",
}


def queries(scenario: Scenario, trace: ScenarioTrace, book: ReferenceBook) -> list[Query]:
    """The questions that the oracle must answer before `judge` can run, as far as the answers in `book` determine them.

    A query may depend on an earlier answer (scoring a rendered prompt), so the driver asks until nothing is missing:
    ``while new := book.missing(queries(scenario, trace, book)): …``. A check whose `queries` raises adds no further one:
    the missing answers then make its verdict untestable.
    """
    found: list[Query] = []
    if trace.end.outcome == "failed":
        return found
    evidence = Evidence(trace, book)
    found.append(evidence.noise_question)
    for ask in dict.fromkeys(check.queries for check in (*scenario.checks, *ALWAYS)):  # many checks ask the same
        try:
            for query in ask(evidence):
                found.append(query)  # queries before an exception count
        except UnansweredQuery:
            continue  # the next round asks the rest
        except Exception:  # noqa: BLE001, S112 - judging meets it again and reports it with its traceback
            continue
    return found


def judge(scenario: Scenario, trace: ScenarioTrace, reference: ReferenceBook) -> list[Verdict]:
    """One verdict for each of the scenario's checks, and for each check of `ALWAYS` that found something to judge.

    Fails closed: a check that judged no fact, raised, or needed an answer that the oracle never gave is `untestable`.
    A scenario that did not reach its end fails all its own checks if the stack is to blame.
    """
    return judge_evidence(scenario, Evidence(trace, reference))


def judge_evidence(scenario: Scenario, evidence: Evidence) -> list[Verdict]:
    """As `judge`, on evidence that other code uses too: results stay cached in it."""
    trace = evidence.trace
    if trace.end.outcome == "failed":
        error, header = trace.end.error, trace.header
        if error is not None and error.kind == ModelLacks.__name__:  # the stack has not been asked
            said = f"is {Cause.NOT_HERE}: {error.message}"
            return _missing(scenario, header.target, header.topology.name, Cause.NOT_HERE, said)
        finding = _not_driven(trace)
        return with_causes([(check, _verdict(scenario, trace, check, finding)) for check in scenario.checks])
    found = [(check, run(check, evidence) or _nothing(check)) for check in scenario.checks]
    found += [(check, own) for check in ALWAYS if (own := run(check, evidence)) is not None]
    return with_causes([(check, _verdict(scenario, trace, check, finding)) for check, finding in found], trace.calls)


def run(check: Check, evidence: Evidence) -> Finding | None:
    """Runs one check; one that could judge nothing is `untestable`. None if a check of `ALWAYS` finds nothing of its kind."""
    try:
        finding = blind(evidence, check.tap) or check.judge(evidence)
        if finding is None:
            return None
        if finding.status == "pass" and finding.facts <= 0:
            return _nothing(check)
        return _unless_blind(finding)
    except UnansweredQuery as e:
        return untestable(
            f"{check.name} needs an answer that the reference was never asked for", evidence=[{"query": str(e)}]
        )
    except Exception as e:  # noqa: BLE001 - a check may raise anything; it becomes a verdict, never a pass
        frames = traceback.extract_tb(e.__traceback__)[-3:]
        shown = {
            "exception": f"{type(e).__name__}: {e}",
            "traceback": [f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in frames],
        }
        broke = untestable(f"check {check.name} raised {type(e).__name__}", evidence=[shown])
        return msgspec.structs.replace(broke, cause=Cause.RAISED)


def missing(
    scenario: Scenario, target: str, topology: str, offered: Iterable[Capability], declared: Iterable[Capability] = ()
) -> list[Verdict]:
    """A verdict `missing` for each of the scenario's checks if the stack lacks a capability it needs, else none.

    `offered` are the capabilities of this start, `declared` those of the target with all that it needs, such as a GPU.
    """
    lacks = sorted(scenario.needs - frozenset(offered))
    if not lacks:
        return []
    cause, reason = Cause.NOT_OFFERED, f"does not declare {', '.join(lacks)}"
    if set(lacks) <= set(declared):
        cause, reason = Cause.NOT_HERE, f"is {Cause.NOT_HERE}: needs {', '.join(lacks)}"
    return _missing(scenario, target, topology, cause, reason)


def _missing(scenario: Scenario, target: str, topology: str, cause: Cause, reason: str) -> list[Verdict]:
    why: dict[str, Any] = {"status": Conformance.MISSING, "reason": reason}
    verdicts = with_causes([(check, _about(scenario, check, target, topology, **why)) for check in scenario.checks])
    return [msgspec.structs.replace(verdict, cause=cause) for verdict in verdicts]


def absent(scenario: Scenario, target: str, topology: str, reason: str, blame: Blame) -> list[Verdict]:
    """A verdict `untestable` for each check of a scenario that should have been driven and has no recording."""
    why: dict[str, Any] = {"status": Conformance.UNTESTABLE, "reason": reason, "blame": blame}
    return with_causes([(check, _about(scenario, check, target, topology, **why)) for check in scenario.checks])


def _unless_blind(finding: Finding) -> Finding:
    """A pass of a numeric check counts only if its weakest seeded fault would have been red."""
    margin = finding.margin
    if finding.status != "pass" or margin is None:
        return finding
    weakest = margin.weakest
    if weakest is None:
        reason = "no fault could be seeded into what was recorded: nothing shows that the bound is of use"
    elif margin.faults[weakest] <= margin.bound:
        reason = f"the bound hides a seeded fault: {weakest}"
    else:
        return finding
    return msgspec.structs.replace(finding, status="untestable", reason=reason, blame=Blame.HARNESS)


def _nothing(check: Check) -> Finding:
    return untestable(f"{check.name} judged nothing: the recording holds no fact of its kind")


def _not_driven(trace: ScenarioTrace) -> Finding:
    error = trace.end.error or CallError(kind="no reason was recorded", message="", blame=Blame.HARNESS)
    blame = Blame(error.blame) if error.blame in set(Blame) else Blame.HARNESS
    return Finding(
        status="fail" if blame == Blame.STACK else "untestable",
        facts=0,
        reason=f"could not be driven: {error.said}",
        cause=Cause.NOT_DRIVEN,
        evidence=[
            {
                "error": error.kind,
                "message": error.message,
                "status": error.status,
                **({"place": error.place} if error.place else {}),
                **_last_call(trace),
            }
        ],
        blame=blame,
    )


def _last_call(trace: ScenarioTrace) -> dict[str, str]:
    if not trace.calls:
        return {}
    last = max(trace.calls, key=lambda call: call.ended_ns)
    return {"last call": last.method, "phase": last.phase}


def _verdict(scenario: Scenario, trace: ScenarioTrace, check: Check, finding: Finding) -> Verdict:
    blame = None if finding.status == "pass" else finding.blame or Blame.HARNESS
    found = msgspec.structs.asdict(finding) | {"blame": blame}  # a verdict has every field of a finding
    about = _about(scenario, check, trace.header.target, trace.header.topology.name, **found)
    own = finding.status == "fail" and finding.cause is None
    return msgspec.structs.replace(
        about,
        next_step=(own and check.next_step) or about.next_step,
        left_out=sum(int(mark.numbers["left_out"]) for mark in trace.own_marks if mark.name == ENUMERATED),
    )


def _about(
    scenario: Scenario, check: Check, target: str, topology: str, *, blame: Blame | None = None, **found: Any
) -> Verdict:
    return Verdict(
        scenario=scenario.name,
        wave=scenario.wave,
        task=scenario.task,
        promise=scenario.promise,
        topology=topology,
        check=check.name,
        target=target,
        fault=check.fault,
        source=check.source,
        next_step=NEXT_STEP[blame] if blame else "",
        blame=blame,
        **found,
    )
