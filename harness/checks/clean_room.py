"""What a scenario begins with: the clean room is recorded, and judged like everything else.

Weights are read on every server. What reached a server tells whether it is resumed, awake and has an empty cache: the canary
needs one server only.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.checks.base import Check, Evidence, Finding, Tap, concluded, together, untestable
from harness.checks.echo import reached
from harness.checks.instruments import blind
from harness.checks.weights import about_versions, hold_their_version
from harness.contract.faults import NOTHING, Fact
from harness.records.recording import Call
from harness.records.reference import Query

UNCLEAN = "the scenario began on other weights than the checkpoint's"
BEGINNING = ("resume", "wake_up", "reset_prefix_cache")
"""Calls of the clean room that have to reach every server."""


def _digests(evidence: Evidence) -> Call | None:
    """Those of the last clean room: a scenario that missed its moment has several."""
    read = (c for c in reversed(evidence.trace.calls) if c.phase == "clean_room" and c.method == "digests")
    return next((call for call in read if call.result is not None), None)


def _judge(evidence: Evidence) -> Finding | None:
    if evidence.header.topology.pipeline_parallel > 1:
        return None  # the reference does not know which layers a stage of a pipeline holds
    read = _digests(evidence)
    if read is None:
        return untestable("the clean room read no parameters")
    found = hold_their_version(evidence, [(read, 0)], [0])
    if found.status == "fail":
        shown = [{"found": found.reason, **one} for one in found.evidence]
        found = msgspec.structs.replace(found, reason=UNCLEAN, reasons=[], evidence=shown)
    return together([found, _reached_everyone(evidence)])


def _reached_everyone(evidence: Evidence) -> Finding:
    """Judges nothing where the tap is blind (`instruments` says so). Not every stack tells its engines of a resume: one that reaches
    no server at all is left to the canary."""
    facts, wrong = 0, []
    calls = [] if blind(evidence, Tap.READ) else evidence.trace.calls
    for call in calls:
        if call.phase != "clean_room" or call.method not in BEGINNING or call.error is not None:
            continue
        servers = {control.server for control in reached(evidence, call)}
        missed = sorted(set(evidence.header.servers) - servers)
        facts += 1
        if missed and (servers or call.method == "reset_prefix_cache"):
            shown = {"call": call.id, "method": call.method, "servers": missed}
            wrong.append((f"{call.method}() of the clean room did not reach every server", shown))
    return concluded(facts, wrong)


def _queries(evidence: Evidence) -> Iterator[Query]:
    if _digests(evidence) is not None and evidence.header.topology.pipeline_parallel == 1:
        yield from about_versions(evidence, [0])


CLEAN_ROOM = Check(
    name="clean_room",
    fault="a scenario is judged although it began on weights or a cache that another one left behind, or paused on some server",
    next_step="drive this scenario alone: if it begins clean, the scenario driven before it left behind what the evidence shows",
    reads=Fact.POLICY | Fact.ADAPTERS | Fact.PAUSES,
    falsifies=~NOTHING,
    source="architecture, rule 4: a clean room per scenario; parameter digests are read, not assumed",
    judge=_judge,
    queries=_queries,
)
