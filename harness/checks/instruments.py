"""Whether the instruments saw anything. A check of a tap that saw nothing is untestable, never passed.

The clean room sends a canary request through the stack before each scenario (a call labelled "canary"); the engine tap
must have seen its prompt.
"""

from __future__ import annotations

from harness.checks.base import Check, Evidence, Finding, Tap, passed, untestable
from harness.contract.faults import NOTHING

BLIND = "the engine tap did not see the clean room's canary request"
NEVER_LATE = "the scenario is about messages that come late, and none was late"
SILENT = "the tap of a server saw nothing at all"


def tap_works(evidence: Evidence) -> bool:
    """True if engines ran every canary prompt; False if no canary was sent."""
    wanted = {
        tuple(prompt)
        for call in evidence.trace.calls
        if call.phase == "clean_room" and call.label == "canary" and call.error is None
        for prompt in call.request.get("prompt_token_ids") or ()
    }
    return bool(wanted) and wanted <= {execution.prompt for execution in evidence.all_executions}


def silent_servers(evidence: Evidence) -> list[str]:
    """Servers of the recording without any observation, even from the clean room."""
    heard = {seen.server for seen in evidence.trace.observations}
    return [server for server in evidence.header.servers if server not in heard]


def blind(evidence: Evidence, tap: Tap) -> Finding | None:
    """Why a check with this `tap` can judge nothing; None if it can."""
    if tap is not Tap.UNREAD and not tap_works(evidence):
        return untestable(BLIND)
    if tap is Tap.READ_EVERYWHERE and (silent := silent_servers(evidence)):
        return untestable(SILENT, evidence=[{"servers": silent}])
    return None


def _judge(evidence: Evidence) -> Finding | None:
    delayed = any(call.error is None and call.request["seed"] is not None for call in evidence.calls("delay"))
    if delayed and not any(seen.kind == "delay" for seen in evidence.trace.observations):
        return untestable(NEVER_LATE)
    return passed(len(evidence.all_executions))


INSTRUMENTS = Check(
    name="instruments",
    fault="the engine tap is not installed or cannot be read, so every check that reads it would judge nothing",
    source="architecture, rule 7: each instrument has a canary",
    falsifies=~NOTHING,
    tap=Tap.READ,
    judge=_judge,
)
