"""After a sync every server holds every parameter of that policy version, and nothing else moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from harness.checks.answers import nothing_to_judge
from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.contract.faults import Fact
from harness.records.recording import Call
from harness.records.reference import ExpectedDigestsRequest, ExpertShard, UnansweredQuery

NOT_READ = "no parameter digests were read in the scenario"
NOTHING_BETWEEN = "nothing that could move a parameter happened between two readings of a version"
MOVES_PARAMETERS = ("sync_weights", "sleep", "load_lora_adapter")
"""Calls that may move a parameter, on purpose or not."""
OF_EXPERTS = ".experts."
"""In the name of each parameter that holds one expert or several."""

Problem = tuple[str, dict[str, Any]]
"""(reason, evidence)"""

Place = tuple[int, ExpertShard | None]
"""(tensor-parallel rank, share of the experts) of a worker. Together with the version they determine its parameters. None: the
experts are split like all other parameters."""


def _read(evidence: Evidence) -> list[Call]:
    return [call for call in evidence.calls("digests") if call.result is not None]


def _unread(evidence: Evidence) -> Finding:
    """Why nothing was read: the stack failed at it, or nobody asked."""
    return nothing_to_judge(evidence, NOT_READ, ("digests",))


def _versions(evidence: Evidence) -> list[int]:
    """All versions of the scenario, the clean room's 0 first."""
    synced = [call.request["version"] for call in evidence.calls("sync_weights")]
    return list(dict.fromkeys([0, *synced]))


def _workers(evidence: Evidence) -> dict[tuple[str, int], Place]:
    """(server, rank) → its place. With data parallelism an engine has one server per data-parallel rank, in order. If experts are
    spread, all workers of an engine share them; the tensor-parallel rank determines all other parameters (vLLM)."""
    topology = evidence.header.topology
    tensor, data = topology.tensor_parallel, topology.data_parallel
    spread = data > 1 or topology.expert_parallel

    def share(at: int, rank: int) -> ExpertShard | None:
        number = at % data * tensor + rank
        return ExpertShard(rank=number, workers=tensor * data, whole=topology.expert_parallel) if spread else None

    servers = enumerate(evidence.header.servers)
    return {(server, rank): (rank, share(at, rank)) for at, server in servers for rank in range(tensor)}


def _expected(evidence: Evidence, version: int, place: Place) -> ExpectedDigestsRequest:
    topology = evidence.header.topology
    rank, share = place
    return ExpectedDigestsRequest(
        version=version,
        quantization=topology.quantization,
        tensor_parallel=topology.tensor_parallel,
        rank=rank,
        experts=share,
    )


def _queries(evidence: Evidence) -> Iterator[ExpectedDigestsRequest]:
    yield from about_versions(evidence, _versions(evidence) if _read(evidence) else ())


def about_versions(evidence: Evidence, versions: Iterable[int]) -> Iterator[ExpectedDigestsRequest]:
    """Questions to the oracle: what each worker must hold of each version."""
    for version in versions:
        for place in dict.fromkeys(_workers(evidence).values()):
            yield _expected(evidence, version, place)


def _ranks(call: Call) -> Iterator[tuple[str, int, dict[str, str]]]:
    """(server, rank, parameter → digest) of one digests call."""
    for server, ranks in sorted((call.result or {})["servers"].items()):
        for rank, digests in enumerate(ranks):
            yield server, rank, digests


def shown_whole(evidence: Evidence, versions: Iterable[int]) -> Iterator[tuple[Call, str, frozenset[int]]]:
    """Each reading of a server, with those of `versions` that all its workers hold to the last parameter."""
    if evidence.header.topology.pipeline_parallel > 1:
        return
    places, versions = _workers(evidence), list(versions)
    for call in _read(evidence):
        by_server: dict[str, set[int]] = {}
        for server, rank, digests in _ranks(call):
            place = places.get((server, rank))
            held = {
                v
                for v in versions
                if place and digests == evidence.reference.expected_digests(_expected(evidence, v, place))
            }
            by_server[server] = by_server.get(server, held) & held
        yield from ((call, server, frozenset(held)) for server, held in by_server.items())


def _judge_every_parameter(evidence: Evidence) -> Finding:
    if not _read(evidence):
        return _unread(evidence)
    return hold_their_version(
        evidence, [(call, evidence.version_at(call.started_ns)) for call in _read(evidence)], _versions(evidence)
    )


def hold_their_version(evidence: Evidence, readings: Iterable[tuple[Call, int]], versions: Iterable[int]) -> Finding:
    """Does every worker hold every parameter as the version of each reading has it? `versions`: all that it may hold by mistake."""
    if evidence.header.topology.pipeline_parallel > 1:
        return untestable("the reference does not know which layers a stage of a pipeline holds")
    places = _workers(evidence)
    try:
        known = {
            place: {v: evidence.reference.expected_digests(_expected(evidence, v, place)) for v in versions}
            for place in set(places.values())
        }
    except UnansweredQuery:
        return untestable("the reference was not asked for the digests of a version")
    facts, wrong = 0, []
    for call, version in readings:
        workers = {(server, rank): digests for server, rank, digests in _ranks(call)}
        facts += sum(len(known[place][version]) for place in places.values())
        if absent := max(0, len(evidence.header.servers) - len({server for server, _ in workers})):
            shown: dict[str, Any] = {"call": call.id, "version": version, "servers absent": absent}
            wrong.append(("a server shows no parameters", shown))
        for (server, rank), digests in workers.items():
            place = places.get((server, rank))
            if place is None:
                shown = {"call": call.id, "server": server, "rank": rank}
                wrong.append(("a server has more workers than the topology", shown))
                continue
            others = [theirs[version] for other, theirs in known.items() if other != place]
            own = known[place]
            another = _anothers(digests, own[version], others)
            syncs = sum(c.ended_ns <= call.started_ns for c in evidence.calls("sync_weights"))
            where = {"call": call.id, "server": server, "rank": rank, "version": version, "syncs": syncs}
            for why, shown in [another] if another else _problems(digests, version, own):
                wrong.append((why, {**where, **shown}))
        for server in sorted({server for server, _ in workers}):
            if lost := [rank for at, rank in places if at == server and (server, rank) not in workers]:
                wrong.append(("a worker shows no parameters", {"call": call.id, "server": server, "ranks": lost}))
    syncs = sum(call.error is None for call in evidence.calls("sync_weights"))
    return concluded(facts, wrong, servers=len(evidence.header.servers), workers=len(places), syncs=syncs)


def _of_experts(digests: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if OF_EXPERTS in name}


def _of_all_else(digests: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if OF_EXPERTS not in name}


def _anothers(digests: dict[str, str], expected: dict[str, str], others: Iterable[dict[str, str]]) -> Problem | None:
    """The problem of a worker that holds another worker's experts and all other parameters rightly; else None."""
    held, own = _of_experts(digests), _of_experts(expected)
    if held == own or _of_all_else(digests) != _of_all_else(expected):
        return None
    if held not in [_of_experts(theirs) for theirs in others]:
        return None
    wrong = sorted(name for name in {*held, *own} if held.get(name) != own.get(name))
    return "a worker holds the experts of another one", {"parameters": wrong[:3]}


def _problems(digests: dict[str, str], version: int, known: dict[int, dict[str, str]]) -> Iterator[Problem]:
    """What is wrong with one worker's parameters, named by its likely cause: one problem per kind."""
    expected = known[version]
    if missing := sorted(set(expected) - set(digests)):
        yield "a parameter of the model is missing in a worker", {"parameters": missing[:3]}
    if unknown := sorted(set(digests) - set(expected)):
        yield "a worker holds a parameter that the model does not have", {"parameters": unknown[:3]}
    wrong = sorted(name for name in digests.keys() & expected.keys() if digests[name] != expected[name])
    old = [name for name in wrong if any(digests[name] == theirs.get(name) for theirs in known.values())]
    whole = [other for other, theirs in known.items() if digests == theirs]
    late = "a server missed a weight sync" if whole else "a parameter was not updated by a weight sync"
    strange = [name for name in wrong if name not in old]
    for why, names in ((late, old), ("a parameter holds values of no policy version", strange)):
        if names:
            name, counts = names[0], {"wrong": len(names), "of": len(expected)}
            found = {**counts, "parameter": name, "expected": expected[name], "held": digests[name]}
            yield why, {**found, "holds version": whole[0]} if whole else found


EVERY_PARAMETER = Check(
    name="every_parameter",
    fault="one server misses a sync, one parameter is never updated, or one is corrupted on the way",
    next_step="look up the parameter in the evidence in what the sync sent, and whether this server and rank acknowledged it",
    reads=Fact.POLICY | Fact.ADAPTERS,
    falsifies=Fact.POLICY | Fact.ADAPTERS,
    source='SkyRL #1014, tasks 1 to 3: "Weight sync … completes", "works"; SkyRL #904, weight sync (fan-out)',
    judge=_judge_every_parameter,
    queries=_queries,
)


def _judge_uniform(evidence: Evidence) -> Finding:
    if not _read(evidence):
        return _unread(evidence)
    if len(evidence.header.servers) < 2:
        return untestable("there is one server: no other to compare it with")
    facts = 0
    wrong: list[Problem] = []
    for call in _read(evidence):
        by_rank: dict[int, dict[str, dict[str, str]]] = {}
        for server, rank, digests in _ranks(call):
            by_rank.setdefault(rank, {})[server] = _held_by_all(evidence, digests)
        if len((call.result or {})["servers"]) != len(evidence.header.servers) or not by_rank:
            wrong.append(("a server shows no parameters", {"call": call.id}))
        for rank, found in by_rank.items():
            if not all(found.values()):
                wrong.append(("a worker shows no parameters", {"call": call.id, "rank": rank}))
            (first_server, first), *others = found.items()
            for server, digests in others:
                facts += len(first)
                if first and digests and digests != first:
                    names = sorted(n for n in {*first, *digests} if first.get(n) != digests.get(n))
                    shown = {"servers": [first_server, server], "rank": rank, "parameters": names[:3]}
                    wrong.append(("servers hold different parameters", {"call": call.id, **shown}))
    return concluded(facts, wrong, servers=len(evidence.header.servers))


def _held_by_all(evidence: Evidence, digests: dict[str, str]) -> dict[str, str]:
    """The parameters of one worker that workers on other servers must also hold. Data-parallel workers split the experts."""
    if evidence.header.topology.data_parallel == 1:
        return digests
    return _of_all_else(digests)


UNIFORM_SERVERS = Check(
    name="uniform_servers",
    fault="servers drift apart: one holds other parameters than the rest",
    next_step="compare what the two servers in the evidence were sent: one was missed, or loaded something else",
    reads=Fact.POLICY,
    source="SkyRL #904: update_weights is fanned out to all servers",
    judge=_judge_uniform,
)


def _judge_same_again(evidence: Evidence) -> Finding:
    first: dict[int, Call] = {}
    facts, again = 0, 0
    wrong: list[Problem] = []
    for call in _read(evidence):
        version = evidence.version_at(call.started_ns)
        if version not in first:
            first[version] = call
            continue
        before = {(server, rank): digests for server, rank, digests in _ranks(first[version])}
        again += any(change.started_ns >= first[version].ended_ns for change in moved_before(evidence, call))
        for server, rank, digests in _ranks(call):
            facts += len(digests)
            earlier = before.get((server, rank), {})
            if digests != earlier:
                names = sorted(n for n in {*digests, *earlier} if digests.get(n) != earlier.get(n))
                shown = {"call": call.id, "first read by": first[version].id, "server": server, "rank": rank}
                shown |= {"version": version, "parameters": names[:3]}
                wrong.append(("syncing a version again does not give the same parameters", shown))
    if not facts:
        return nothing_to_judge(evidence, "no version's digests were read twice", ("digests", "sync_weights"))
    if not wrong and not again:
        return untestable(NOTHING_BETWEEN)
    return concluded(facts, wrong, readings_after_a_change=again)


def moved_before(evidence: Evidence, reading: Call) -> list[Call]:
    """Calls before this one that may have moved a parameter."""
    return [
        call
        for method in MOVES_PARAMETERS
        for call in evidence.calls(method)
        if call.error is None and call.ended_ns <= reading.started_ns
    ]


SAME_VERSION_SAME_PARAMETERS = Check(
    name="same_version_same_parameters",
    fault="a sync is not idempotent, or its result depends on the earlier weights",
    next_step="look at what the sync adds to or keeps of the earlier weights of the parameters in the evidence",
    reads=Fact.POLICY | Fact.ADAPTERS,
    source="architecture, idempotent sync: syncing the weights that are there moves no digest",
    judge=_judge_same_again,
)
