"""How weights travel: by which operations of the engine, into which worker classes, over which transport."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from harness.checks.base import Check, Evidence, Finding, Tap, concluded, failed, passed, untestable
from harness.contract.faults import Fact
from harness.contract.messages import WorkersResult
from harness.records.recording import Call, Observation

UPDATE = "update_weights"
START, FINISH = "start_weight_update", "finish_weight_update"
RPC = "collective_rpc"
"""Operations of an engine (vLLM, AsyncLLM): its own weight transfer, and a call of any method of a worker class."""
OWN = frozenset({"init_weight_transfer_engine", START, UPDATE, FINISH})
"""Methods of vLLM's own worker, which the engine's weight transfer calls by `RPC` (vLLM, AsyncLLM.update_weights)."""
NOT_ASKED = "nobody asked what the workers are"


def within(evidence: Evidence, call: Call) -> list[Observation]:
    """Control calls that reached engines during a call."""
    return [seen for seen in evidence.controls() if call.started_ns <= seen.at_ns <= call.ended_ns]


def _problem(ops: Counter[str]) -> str | None:
    if ops[RPC]:
        return "a sync calls methods that a worker class was given beside the engine's own"
    if not ops[UPDATE]:
        return "a sync did not reach a server through the engine's own weight transfer"
    if ops[START] != ops[FINISH] or ops[START] > 1:
        return "a sync in chunks was begun and finished another number of times"
    return None


def _judge_native(evidence: Evidence) -> Finding:
    syncs = evidence.succeeded("sync_weights")
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in syncs:
        seen = within(evidence, call)
        for server in evidence.header.servers:
            here = (control.data for control in seen if control.server == server)
            ops = Counter(str(data["op"]) for data in here if data.get("arguments", {}).get("method") not in OWN)
            if why := _problem(ops):
                wrong.append((why, {"call": call.id, "server": server, "operations": dict(ops)}))
    facts = len(syncs) * len(evidence.header.servers)
    if wrong:
        return concluded(facts, wrong)
    return passed(facts) if facts else untestable("no sync succeeded")


NATIVE_TRANSFER = Check(
    name="native_transfer",
    fault="a method that the stack has put into the engine's workers loads the weights",
    reads=Fact.POLICY,
    source="SkyRL #1014, task 14: Native weight sync; vLLM documentation, Weight Transfer",
    tap=Tap.READ_EVERYWHERE,
    judge=_judge_native,
)


def _answers(evidence: Evidence) -> list[WorkersResult]:
    return [msgspec.convert(call.result, WorkersResult) for call in evidence.calls("workers") if call.result]


def _every_worker(evidence: Evidence, field: str, right: object, reason: str) -> Finding:
    """Judges if each worker of each server reports `right` in `field`."""
    facts, wrong = 0, []
    for answer in _answers(evidence):
        if absent := set(evidence.header.servers) - {server for server, workers in answer.servers.items() if workers}:
            return untestable("a server shows no worker", evidence=[{"servers": sorted(absent)}])
        for server, workers in answer.servers.items():
            facts += len(workers)
            said = [(worker.rank, getattr(worker, field)) for worker in workers]
            wrong += [{"server": server, "rank": rank, field: value} for rank, value in said if value != right]
    if wrong:
        return failed(facts, reason, wrong)
    return passed(facts) if facts else untestable(NOT_ASKED)


def _judge_extension(evidence: Evidence) -> Finding:
    return _every_worker(evidence, "extensions", [], "a worker class is extended by a class of the stack's own")


NO_EXTENSION = Check(
    name="no_worker_extension",
    fault="the stack still puts a class of its own into the engine's workers",
    source='SkyRL #1014, task 14: "no worker extension"; vLLM documentation, worker_extension_cls',
    judge=_judge_extension,
)


def _judge_ipc(evidence: Evidence) -> Finding:
    return _every_worker(evidence, "transport", "ipc", "a colocated worker takes weights by another way than CUDA IPC")


BY_IPC = Check(
    name="by_ipc",
    fault="colocated engines fall back on a broadcast that copies every weight over the network",
    source="SkyRL #1014, task 15; SkyRL 0.2.0, get_transfer_strategy",
    judge=_judge_ipc,
)
