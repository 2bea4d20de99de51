"""What a scenario begins with: the clean room is recorded, and judged like everything else.

The driver proves the rest of it by its canary: an engine that is paused, asleep or dead answers none (`instruments`).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.checks.base import Check, Evidence, Finding, untestable
from harness.checks.weights import about_versions, hold_their_version
from harness.contract.faults import NOTHING, Fact
from harness.records.recording import Call
from harness.records.reference import Query

UNCLEAN = "the scenario began on other weights than the checkpoint's"


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
    if found.status != "fail":
        return found
    shown = [{"why": found.reason, **one} for one in found.evidence]
    return msgspec.structs.replace(found, reason=UNCLEAN, evidence=shown)


def _queries(evidence: Evidence) -> Iterator[Query]:
    if _digests(evidence) is not None and evidence.header.topology.pipeline_parallel == 1:
        yield from about_versions(evidence, [0])


CLEAN_ROOM = Check(
    name="clean_room",
    fault="a scenario is judged although it began on weights that another one left behind, or on another checkpoint",
    next_step="drive this scenario alone: if it begins clean, the scenario driven before it left the weights in the evidence behind",
    reads=Fact.POLICY | Fact.ADAPTERS,
    falsifies=~NOTHING,
    source="architecture, rule 4: a clean room per scenario; parameter digests are read, not assumed",
    judge=_judge,
    queries=_queries,
)
