"""junit.xml for CI: one test case per verdict. Red is a failure, known is skipped with its ledger entry.

A case's `time` is that of the drives that were judged: all takes of its stack, in a comparison of both. The verdicts of one
scenario share drives, so their times add up to more than the suite's.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from harness.records.differing import around_the_difference
from harness.records.verdict import Conformance, Judgement, Verdict
from reports import reproduce
from reports.text import exact, one_line, seconds, shortened, visible
from reports.view import count, question


def encode(judgement: Judgement) -> bytes:
    """The bytes of junit.xml. Problems of the whole run (nothing judged, ended early, ledger) are failures too."""
    run, counts = judgement.run, count(judgement)
    suite = ET.Element("testsuite", name=one_line(f"rollout-parity {run.run_id}"), timestamp=one_line(run.created_at))
    properties = ET.SubElement(suite, "properties")
    facts = {
        "exit_status": judgement.exit_status, "red": counts.red, "known": counts.known, "start": run.start,
        "engine": run.engine, "baseline": run.baseline or "", "candidate": run.candidate or "", "command": run.command,
        "question": question(judgement), "may_replace": bool(judgement.gate and judgement.gate.may_replace),
        **{f"seconds.{stage}": seconds(value) for stage, value in run.seconds.items()},
    }  # fmt: skip
    for name, value in facts.items():
        ET.SubElement(properties, "property", name=one_line(name), value=one_line(str(value)))
    took = {(d.scenario, d.topology, d.target): d.seconds for d in judgement.drives}
    suite.set("time", f"{sum(took.values()):.3f}")
    for verdict in judgement.verdicts:
        stacks = {verdict.target, verdict.baseline or verdict.target}
        judged = [took.get((verdict.scenario, verdict.topology, stack), 0.0) for stack in stacks]
        _case(suite, verdict, judgement, sum(judged))
    if not judgement.verdicts:
        _problem(suite, "run", "something was judged", "nothing was judged")
    if run.outcome != "completed":
        _problem(suite, "run", "the run completed", run.outcome)
    for where, error in run.not_started.items():
        _problem(suite, "run", f"{where} starts", f"{error.kind}: {error.message}")
    for problem in judgement.ledger_problems:
        _problem(suite, "ledger", problem.entry, f"{problem.problem}. Next: {problem.next_step}")
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("errors", "0")
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    ET.indent(suite)
    return bytes(ET.tostring(suite, encoding="utf-8", xml_declaration=True)) + b"\n"


def _case(suite: ET.Element, verdict: Verdict, judgement: Judgement, took: float) -> None:
    about = {"classname": one_line(verdict.scenario), "name": one_line(verdict.id), "time": f"{took:.3f}"}
    case = ET.SubElement(suite, "testcase", about)
    if verdict.known is not None:
        message = one_line(f"known divergence {verdict.known}: {verdict.reason}")
        ET.SubElement(case, "skipped", type="known", message=message)
    elif verdict.red:
        message = one_line(f"{verdict.status}: {verdict.told}")
        failure = ET.SubElement(case, "failure", type=one_line(verdict.status), message=message)
        failure.text = "\n".join(_details(verdict, judgement))
    elif verdict.status == Conformance.MISSING:
        ET.SubElement(case, "skipped", type="missing", message=one_line(f"not offered: {verdict.reason}"))
    if verdict.numbers:
        ET.SubElement(case, "system-out").text = exact(verdict.numbers)


def _details(verdict: Verdict, judgement: Judgement) -> list[str]:
    lines = [
        ("promise", verdict.promise),
        ("because of", verdict.because or ""),
        ("blame", verdict.blame or ""),
        ("fault", verdict.fault),
        ("source", verdict.source),
        ("next step", verdict.next_step),
        ("reproduce", reproduce.command(verdict, judgement.run)),
    ]
    evidence = [f"evidence: {shortened(exact(around_the_difference(item)), 4_000)}" for item in verdict.evidence]
    return [visible(f"{name}: {text}") for name, text in lines if text] + evidence


def _problem(suite: ET.Element, classname: str, name: str, message: str) -> None:
    case = ET.SubElement(suite, "testcase", classname=classname, name=one_line(name))
    ET.SubElement(case, "failure", type=classname, message=one_line(message))
