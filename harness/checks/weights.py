"""After a sync every server holds every parameter of that policy version, and nothing else moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable
from harness.recording import Call
from harness.reference import ExpectedDigestsRequest, UnansweredQuery

NOT_READ = "no parameter digests were read in the scenario"


def _read(evidence: Evidence) -> list[Call]:
    return [call for call in evidence.calls("digests") if call.result is not None]


def _versions(evidence: Evidence) -> list[int]:
    """All versions that the scenario knows, the clean room's 0 first."""
    synced = [call.request["version"] for call in evidence.calls("sync_weights")]
    return list(dict.fromkeys([0, *synced]))


def _queries(evidence: Evidence) -> Iterator[ExpectedDigestsRequest]:
    for version in _versions(evidence) if _read(evidence) else ():
        yield ExpectedDigestsRequest(version=version, quantization=evidence.header.topology.quantization)


def _ranks(call: Call) -> Iterator[tuple[str, int, dict[str, str]]]:
    """(server, rank, parameter → digest) of one digests call."""
    for server, ranks in sorted((call.result or {})["servers"].items()):
        for rank, digests in enumerate(ranks):
            yield server, rank, digests


def _judge_every_parameter(evidence: Evidence) -> Finding:
    if not _read(evidence):
        return untestable(NOT_READ)
    if evidence.header.topology.world_size != evidence.header.topology.engines:
        return untestable("the reference knows whole parameters only: compare sharded workers with each other")
    try:
        held_in = evidence.header.topology.quantization
        known = {version: evidence.reference.expected_digests(version, held_in) for version in _versions(evidence)}
    except UnansweredQuery:
        return untestable("the reference was not asked for the digests of a version")
    facts, wrong = 0, []
    for call in _read(evidence):
        version = evidence.version_at(call.started_ns)
        expected = known[version]
        servers = {server: digests for server, _, digests in _ranks(call)}
        facts += len(evidence.header.servers) * len(expected)
        if absent := max(0, len(evidence.header.servers) - len(servers)):
            shown: dict[str, Any] = {"version": version, "servers absent": absent}
            wrong.append(("a server shows no parameters", shown))
        for server, digests in servers.items():
            if problem := _problem(digests, version, known):
                syncs = sum(c.ended_ns <= call.started_ns for c in evidence.calls("sync_weights"))
                wrong.append((problem[0], {"server": server, "version": version, "syncs": syncs, **problem[1]}))
    if wrong:
        return failed(facts, "; ".join(sorted({reason for reason, _ in wrong})), [shown for _, shown in wrong])
    return passed(facts)


def _problem(
    digests: dict[str, str], version: int, known: dict[int, dict[str, str]]
) -> tuple[str, dict[str, Any]] | None:
    """What is wrong with one worker's parameters, named by its likely cause."""
    expected = known[version]
    if missing := sorted(set(expected) - set(digests)):
        return "a parameter of the model is missing in a worker", {"parameters": missing[:3]}
    if unknown := sorted(set(digests) - set(expected)):
        return "a worker holds a parameter that the model does not have", {"parameters": unknown[:3]}
    wrong = {name: digest for name, digest in digests.items() if digest != expected[name]}
    if not wrong:
        return None
    name = min(wrong)
    shown = {
        "wrong": len(wrong),
        "of": len(expected),
        "parameter": name,
        "expected": expected[name],
        "held": wrong[name],
    }
    for other, theirs in known.items():
        if digests == theirs:
            return "a server missed a weight sync", {**shown, "holds version": other}
    if all(any(digest == theirs.get(n) for theirs in known.values()) for n, digest in wrong.items()):
        return "a parameter was not updated by a weight sync", shown
    return "a parameter holds values of no policy version", shown


EVERY_PARAMETER = Check(
    name="every_parameter",
    fault="one server misses a sync, one parameter is never updated, or one is corrupted on the way",
    source='SkyRL #1014, tasks 1 to 3: "Weight sync … completes", "works"; SkyRL #904, weight sync (fan-out)',
    judge=_judge_every_parameter,
    queries=_queries,
)


def _judge_uniform(evidence: Evidence) -> Finding:
    if not _read(evidence):
        return untestable(NOT_READ)
    facts = 0
    for call in _read(evidence):
        by_rank: dict[int, dict[str, dict[str, str]]] = {}
        for server, rank, digests in _ranks(call):
            by_rank.setdefault(rank, {})[server] = digests
        if len((call.result or {})["servers"]) != len(evidence.header.servers) or not by_rank:
            return failed(facts, "a server shows no parameters", [{"call": call.id}])
        for rank, servers in by_rank.items():
            first_server, first = next(iter(servers.items()))
            if not first:
                return failed(facts, "a worker shows no parameters", [{"call": call.id, "rank": rank}])
            for server, digests in servers.items():
                facts += len(first)
                if digests != first:
                    names = sorted(n for n in {*first, *digests} if first.get(n) != digests.get(n))
                    shown = {"servers": [first_server, server], "rank": rank, "parameters": names[:3]}
                    return failed(facts, "servers hold different parameters", [shown])
    return passed(facts)


UNIFORM_SERVERS = Check(
    name="uniform_servers",
    fault="servers drift apart: one holds other parameters than the rest",
    source="SkyRL #904: update_weights is fanned out to all servers",
    judge=_judge_uniform,
)


def _judge_same_again(evidence: Evidence) -> Finding:
    first: dict[int, Call] = {}
    facts = 0
    for call in _read(evidence):
        version = evidence.version_at(call.started_ns)
        if version not in first:
            first[version] = call
            continue
        before = {(server, rank): digests for server, rank, digests in _ranks(first[version])}
        for server, rank, digests in _ranks(call):
            facts += len(digests)
            earlier = before.get((server, rank), {})
            if digests != earlier:
                names = sorted(n for n in {*digests, *earlier} if digests.get(n) != earlier.get(n))
                shown = [
                    {
                        "server": server,
                        "version": version,
                        "parameters": names[:3],
                        "calls": [first[version].id, call.id],
                    }
                ]
                return failed(facts, "syncing a version again does not give the same parameters", shown)
    return passed(facts) if facts else untestable("no version's digests were read twice")


SAME_VERSION_SAME_PARAMETERS = Check(
    name="same_version_same_parameters",
    fault="a sync is not idempotent, or what it leaves behind depends on what was there before",
    source="architecture, idempotent sync: syncing the weights that are there moves no digest",
    judge=_judge_same_again,
)
