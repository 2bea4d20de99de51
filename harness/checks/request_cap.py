"""A client sends no more requests at a time than its cap allows, whatever calls they belong to."""

from __future__ import annotations

from harness.checks.base import Check, Evidence, Finding, Tap, failed, passed, untestable
from harness.contract.messages import REQUEST_CAP
from harness.records.recording import most_at_once

TOO_MANY = "more requests were in flight at once than the client may send"
NEVER_FULL = "there were never as many requests in flight as the client may send"


def _judge(evidence: Evidence) -> Finding:
    executions = {one.prompt: one for one in evidence.executions}.values()  # `conservation` judges repeated ones
    most = REQUEST_CAP * len(evidence.header.servers)
    peak = most_at_once((one.started_ns, one.ended_ns) for one in executions)
    if peak > most:
        return failed(len(executions), TOO_MANY, [{"in flight": peak, "at most": most}], peak=peak, cap=most)
    return passed(len(executions), peak=peak, cap=most) if peak == most else untestable(NEVER_FULL)


CAP = Check(
    name="request_cap",
    fault="a client sends all its requests at once, or each of its calls or kinds of call has a cap of its own",
    next_step="look at the semaphore around each of the client's data-plane requests: all calls share one",
    source="SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE: at most this many tasks per engine are in flight at once",
    tap=Tap.READ,
    judge=_judge,
)
