"""What a stack says of its own weights: the client's count of syncs, and the label that every server reports."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from harness.checks.base import UNTOLD, Check, Evidence, Finding, concluded, together, untestable
from harness.checks.staleness import overlap
from harness.checks.weights import about_versions, hold_their_version
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.reference import ExpectedDigestsRequest

UNCOUNTED = "a completed sync is not counted"
MISCOUNTED = "the client counts what is no completed sync"
OLD_SALT = "trajectories after a sync share the salt of trajectories before it"
SILENT = "a server reports no label"
ANOTHER = "a server does not report the label of its last completed sync"
OUTLIVED = "a server reports the label of weights that a later sync replaced"


def _before(evidence: Evidence, reading: Call) -> list[Call]:
    """The completed syncs before a reading, in order."""
    syncs = evidence.succeeded("sync_weights")
    return [call for call in syncs if call.ended_ns <= reading.started_ns]


def _readings(evidence: Evidence, method: str) -> list[Call]:
    """Successful readings that no sync overlaps."""
    syncs = evidence.calls("sync_weights")
    found = [call for call in evidence.calls(method) if call.result is not None]
    return [call for call in found if not any(overlap(sync, call) for sync in syncs)]


def _judge_count(evidence: Evidence) -> Finding:
    """Judges by how much the count moves between readings. A client may have counted earlier syncs too."""
    readings = _readings(evidence, "sync_count")
    syncs = evidence.calls("sync_weights")
    facts, wrong = 0, []
    for one, other in itertools.pairwise(readings):
        between = [s for s in syncs if one.ended_ns <= s.started_ns and s.ended_ns <= other.started_ns]
        completed = sum(sync.error is None for sync in between)
        counted = _count(other) - _count(one)
        facts += len(between)
        if counted != completed:
            shown = {"call": other.id, "counted": counted, "completed": completed, "failed": len(between) - completed}
            wrong.append((UNCOUNTED if counted < completed else MISCOUNTED, shown))
    if not facts:
        return untestable("no sync lies between two readings of the client's count")
    return concluded(facts, wrong, readings=len(readings))


def _count(reading: Call) -> int:
    return int((reading.result or {})["count"])


SYNCS_COUNTED = Check(
    name="syncs_counted",
    fault="the client's count of syncs misses one, counts a failed one, or is lost with a copy of the client",
    next_step="look at who increments the count, and whether that client is the one that is read",
    reads=Fact.POLICY,
    source='SkyRL 0.3.0, RemoteInferenceClient.increment_weight_version: "Called once per completed weight sync to the engines"',
    judge=_judge_count,
)


def _judge_salts(evidence: Evidence) -> Finding:
    """Judges pairs of gym requests of one client between which a sync was completed."""
    syncs, facts, wrong = evidence.succeeded("sync_weights"), 0, []
    for one, other in itertools.combinations(evidence.succeeded("gym_generate"), 2):
        same = one.request.get("earlier_client") == other.request.get("earlier_client")
        if not same or not any(one.ended_ns <= s.started_ns and s.ended_ns <= other.started_ns for s in syncs):
            continue
        salts = [_salts(evidence, call) for call in (one, other)]
        if not all(salts):
            return untestable("no engine says under which salt a trajectory's prompts were")
        facts += 1
        if shared := salts[0] & salts[1]:
            wrong.append((OLD_SALT, {"before": one.id, "after": other.id, "salts": sorted(shared)}))
    return concluded(facts, wrong) if facts else untestable("no sync lies between trajectories of one client")


def _salts(evidence: Evidence, call: Call) -> set[str]:
    """The salts of requests that engines began during the call."""
    found = (one for one in evidence.executions if call.started_ns <= one.started_ns <= call.ended_ns)
    return {one.cache_salt for one in found if one.cache_salt not in (None, UNTOLD)}


SALTS_OF_WEIGHTS = Check(
    name="salts_of_weights",
    fault="trajectories after a sync get the salt of the weights before, so they read keys and values that these made",
    next_step="look at whose count of syncs the salt is made of: a copy of the client does not see the syncs of another",
    reads=Fact.POLICY,
    source='SkyRL 0.3.0, GeneratorConfig.use_cache_salt: "cache blocks are only shared across trajectories that started with the same '
    'policy weight version"; RemoteInferenceClient: "Serializable: Can be pickled and passed between processes"',
    judge=_judge_salts,
)


def _labelled(calls: list[Call]) -> dict[str, int]:
    """label → policy version that these syncs gave it."""
    given = ((call.request.get("weight_label"), call.request["version"]) for call in calls)
    return {label: version for label, version in given if label is not None}


def _judge_labels(evidence: Evidence) -> Finding:
    """Judges each reading after a labelled sync, and the parameters that were read after it and before the next sync."""
    readings = [call for call in _readings(evidence, "weight_labels") if _labelled(_before(evidence, call))]
    if not readings:
        return untestable("no label was read after a sync that gave one")
    wrong: list[tuple[str, dict[str, Any]]] = []
    for reading in readings:
        syncs = _before(evidence, reading)
        last, told = syncs[-1], (reading.result or {})["servers"]
        due, earlier = last.request.get("weight_label"), _labelled(syncs[:-1])
        for server in evidence.header.servers:
            label = told.get(server)
            shown = {
                "call": reading.id,
                "server": server,
                "label": label,
                "due": due,
                "version": last.request["version"],
            }
            if label is None:
                wrong.append((SILENT, shown))
            elif due is not None and label != due:
                wrong.append((ANOTHER, shown))
            elif due is None and label in earlier:
                wrong.append((OUTLIVED, shown))
    found = concluded(len(readings) * len(evidence.header.servers), wrong, readings=len(readings))
    held = _held(evidence, readings)
    if not held:
        return found
    return together([found, hold_their_version(evidence, held, _versions(evidence))])


def _held(evidence: Evidence, readings: list[Call]) -> list[tuple[Call, int]]:
    """(digests, version that all servers' label names), for digests read after a label and before the next sync. Those after a sync
    that failed are left out: what a server holds then is open."""
    syncs, found = evidence.calls("sync_weights"), []
    for digests in (call for call in evidence.calls("digests") if call.result is not None):
        before = [sync for sync in syncs if sync.started_ns <= digests.ended_ns]
        since = before[-1].ended_ns if before else 0
        told = [
            reading for reading in readings if since <= reading.started_ns and reading.ended_ns <= digests.started_ns
        ]
        if not told or before[-1].error is not None:
            continue
        labels = set((told[-1].result or {})["servers"].values())
        named = _labelled(_before(evidence, told[-1]))
        if len(labels) == 1 and (label := labels.pop()) in named:
            found.append((digests, named[label]))
    return found


def _versions(evidence: Evidence) -> list[int]:
    return list(dict.fromkeys([0, *(call.request["version"] for call in evidence.calls("sync_weights"))]))


def _queries(evidence: Evidence) -> Iterator[ExpectedDigestsRequest]:
    yield from about_versions(evidence, _versions(evidence) if _readings(evidence, "weight_labels") else ())


WEIGHT_LABELS = Check(
    name="weight_labels",
    fault="a server reports a label of other weights than it holds: of a failed sync, of an earlier one, or of another server's",
    next_step="look at when the server takes the label: it has to come with the end of the sync, to every server",
    reads=Fact.POLICY,
    source='vLLM 0.30, get_weight_version: "Return the latest committed weight version"; finish_weight_update',
    judge=_judge_labels,
    queries=_queries,
)
