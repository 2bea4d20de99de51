"""More requests than fit: how many ran at once, and where the others waited."""

from __future__ import annotations

import msgspec

from harness.checks.base import Check, Evidence, Finding, Tap, concluded, untestable
from harness.checks.matching import assignment, queries
from harness.contract.faults import Fact
from harness.contract.messages import ENGINE_PLACES
from harness.records.recording import most_at_once

FEW = ENGINE_PLACES // 4
"""The least number of requests that a server runs at once while more wait for it than it has places."""


def _judge(evidence: Evidence) -> Finding:
    found = assignment(evidence)
    served = [(row, execution) for row in found.rows for execution in found.of(row)[:1]]
    servers = evidence.header.servers
    if len(served) < 2 * ENGINE_PLACES * len(servers):
        return untestable("fewer requests were served than twice the places of the engines")
    running = {
        server: max(
            (len(o.data["tokens"]) for o in evidence.trace.observations if (o.kind, o.server) == ("step", server)),
            default=0,
        )
        for server in servers
    }
    waiting = {
        "at_the_engines": most_at_once((one.started_ns, one.step_ns[0]) for _, one in served if one.step_ns),
        "before_the_engines": most_at_once((row.call.started_ns, one.started_ns) for row, one in served),
    }
    method = served[0][0].call.method
    asked = {server: sum(one.server == server for _, one in served) for server in servers}
    wrong = []
    for server, most in running.items():
        shown = {"server": server, "at once": most, "places": ENGINE_PLACES, "waited": waiting}
        if most > ENGINE_PLACES:
            wrong.append(("an engine runs more requests at once than it has places", shown))
        elif most < FEW and asked[server] >= ENGINE_PLACES:
            wrong.append((f"{method}() leaves an engine's places empty while its requests wait", shown))
    numbers = {f"most_running_on_{server}": float(most) for server, most in running.items()}
    numbers |= {f"most_waiting_{where}": float(most) for where, most in waiting.items()}
    return msgspec.structs.replace(concluded(len(served), wrong), numbers=numbers)


WHO_WAITS = Check(
    name="who_waits",
    fault="a way in sends a few requests at a time, so that all wait while the engines have free places",
    next_step="look at what limits the requests in flight on this way: a pool of connections, a lock, a router's queue",
    reads=Fact.ANSWERS,
    source='SkyRL, SKYRL_GENERATE_CONCURRENCY_PER_ENGINE: "the rest queue locally and proceed as slots free up"; vLLM documentation, '
    "Engine Arguments: --max-num-seqs",
    tap=Tap.READ_EVERYWHERE,
    judge=_judge,
    queries=queries,
)
