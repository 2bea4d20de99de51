"""What a stack opens to a caller without credentials: routes, sockets, ports, execution of the caller's code. Findings have
severities."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

import msgspec

from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable
from harness.contract.messages import ORIGIN, Answer, Listener, ProbedAddress, ProbeSecurityResult
from harness.records.verdict import Exposure, Severity

REFUSED = frozenset({401, 403, 404})
"""HTTP statuses of a route that does not exist or is closed to this caller (RFC 9110, section 15.5)."""
NOT_THERE = REFUSED | {405}
"""The same for a path that no server has: a proxy may refuse a method before it looks at the path."""
UNCLEAR = frozenset({502, 503, 504})
"""HTTP statuses of a proxy that got no answer: neither open nor closed."""
EVERY_INTERFACE = "0.0.0.0"
"""The address that an empty host binds."""
RED = frozenset({Severity.CRITICAL, Severity.HIGH})
NOT_PROBED = "the stack was not probed"
SOURCE = 'SkyRL #904: "Router (InferenceRouter): Data plane only"; its review on unauthenticated control endpoints'


def _probes(evidence: Evidence) -> list[ProbeSecurityResult]:
    found = [call.result for call in evidence.calls("probe_security") if call.error is None]
    return [msgspec.convert(result, ProbeSecurityResult) for result in found]


def _finding(
    facts: int, exposures: Sequence[Exposure], reason: str, unclear: Finding | None = None, **numbers: float
) -> Finding:
    """Red if an exposure's severity is in `RED`; milder ones are shown. Else `unclear`, if given."""
    red = [one for one in exposures if one.severity in RED]
    shown = [{"severity": one.severity, "where": one.where, "what": one.what, "by": one.by} for one in red]
    judged = failed(facts, reason, shown) if red else unclear or passed(facts, margin=None, **numbers)
    return msgspec.structs.replace(judged, exposures=list(exposures))


# --- routes ---------------------------------------------------------------------------------------------------------


def _routes(evidence: Evidence) -> Finding:
    facts, exposures, kinds, unclear = 0, [], set(), []
    for probe in _probes(evidence):
        nobodys = {(a.address, _method(a)): a.status for a in probe.answers if a.kind == "nothing"}
        asked = [a for a in probe.answers if a.kind in ("control", "weights", "information")]
        odd = [a for a in probe.answers if a.kind == "nothing" and a.status not in NOT_THERE]
        odd += [a for a in asked if (a.address, _method(a)) not in nobodys or a.status in UNCLEAR]
        unclear += odd
        clear = [a for a in asked if a not in odd]
        opened = [a for a in clear if a.status not in REFUSED and a.status != nobodys[a.address, _method(a)]]
        facts += len(clear)
        exposures += [one for address in probe.addresses for one in _open_at(address, opened)]
        front = {address.name for address in probe.addresses if address.data_plane}
        kinds |= {a.kind for a in opened if a.address in front} - {"information"}
    if not facts and not unclear:
        return untestable(NOT_PROBED)
    reason = f"the data plane's address is open without credentials to: {', '.join(sorted(kinds))}"
    return _finding(facts, exposures, reason, _unclear(unclear), routes=facts)


def _unclear(answers: Sequence[Answer]) -> Finding | None:
    if not answers:
        return None
    return untestable("a probe was neither let through nor turned away", evidence=_shown(answers))


def _open_at(address: ProbedAddress, opened: Iterable[Answer]) -> Iterable[Exposure]:
    here = [a for a in opened if a.address == address.name]
    behind = Severity.HIGH if address.data_plane else Severity.MEDIUM
    for kind, severity in (("control", behind), ("weights", behind), ("information", Severity.LOW)):
        routes = [f"{a.route} ({a.status})" for a in here if a.kind == kind]
        if routes:
            plane = ", the data plane's address," if address.data_plane else ""
            yield Exposure(
                severity=severity,
                where=address.name,
                what=f"{address.name}{plane} answers {kind} routes without credentials",
                by=routes,
            )


def _method(answer: Answer) -> str:
    return answer.route.partition(" ")[0]


def _shown(answers: Iterable[Answer]) -> list[dict[str, object]]:
    return [{"address": a.address, "route": a.route, "status": a.status} for a in answers]


CONTROL_PLANE_CLOSED = Check(
    name="control_plane_closed",
    fault="a caller that may generate may also pause the servers, put them to sleep or change their weights",
    source=SOURCE,
    judge=_routes,
)


# --- pickle ---------------------------------------------------------------------------------------------------------


def _pickles(evidence: Evidence) -> Finding:
    probes = _probes(evidence)
    sent = [a for probe in probes for a in probe.answers if a.kind == "pickle"]
    if not sent:
        return untestable(NOT_PROBED)
    read = [a for a in sent if a.unpickled]
    exposures = [
        Exposure(
            severity=Severity.CRITICAL,
            where=where,
            what=f"{where} unpickles what a client without credentials sends: it runs that client's code",
            by=[f"{a.route} ({a.status})" for a in read if a.address == where],
        )
        for where in dict.fromkeys(a.address for a in read)
    ]
    routes = ", ".join(sorted({a.route for a in read}))
    unclear = _unclear([a for a in sent if not a.unpickled and (a.status in UNCLEAR or not a.route)])
    if not all(probe.canaries.get("pickle") for probe in probes):
        unclear = untestable("the pickle leaves no marker where the harness itself reads it")
    reason = f"the pickle of a client without credentials was read by: {routes}"
    return _finding(len(sent), exposures, reason, unclear, sent=len(sent))


NOTHING_UNPICKLED = Check(
    name="nothing_unpickled",
    fault="any client that reaches an address of the stack can run its own code there",
    source='Python documentation, pickle: "Never unpickle data that could have come from an untrusted source"',
    judge=_pickles,
)


# --- pages of other origins -----------------------------------------------------------------------------------------


def _pages(evidence: Evidence) -> Finding:
    sent = [answer for probe in _probes(evidence) for answer in probe.answers if answer.kind == "page"]
    if not sent:
        return untestable(NOT_PROBED)
    exposures = [one for answer in sent if (one := _open_to_pages(answer)) is not None]
    where = ", ".join(sorted(one.where for one in exposures if one.severity in RED))
    reason = f"a page of any origin may call with the credentials of its visitor: {where}"
    unclear = _unclear([answer for answer in sent if answer.status in UNCLEAR])
    return _finding(len(sent), exposures, reason, unclear, asked=len(sent))


def _open_to_pages(answer: Answer) -> Exposure | None:
    origin = answer.shares.get("access-control-allow-origin")
    if origin not in ("*", ORIGIN):
        return None
    credentials = origin == ORIGIN and answer.shares.get("access-control-allow-credentials") == "true"
    return Exposure(
        severity=Severity.HIGH if credentials else Severity.MEDIUM,
        where=answer.address,
        what=f"{answer.address} lets pages of any origin call it{', with credentials' if credentials else ''}",
        by=[f"{answer.route} ({answer.status})"],
    )


CLOSED_TO_PAGES = Check(
    name="closed_to_pages",
    fault="any web page that a user of the machine visits may send requests in that user's name and read the answers",
    source="Fetch standard, CORS protocol and credentials; Starlette documentation, CORSMiddleware: with allow_credentials, "
    'origins "must be explicitly specified"',
    judge=_pages,
)


# --- sockets --------------------------------------------------------------------------------------------------------


def _sockets(evidence: Evidence) -> Finding:
    probes = _probes(evidence)
    if not probes:
        return untestable(NOT_PROBED)
    seen = [one for probe in probes for one in probe.listeners]
    unseen = {a.port for probe in probes for a in probe.addresses} - {None} - {one.port for one in seen}
    blind = unseen or not all(probe.canaries.get("sockets") for probe in probes)
    unclear = untestable("an open socket was not seen: neither would be another one") if blind else None
    beyond: dict[str, list[str]] = {}
    for one in seen:
        if not (_loopback(one.address) and _loopback(one.address if one.shipped is None else one.shipped)):
            beyond.setdefault(re.sub(r"-\d+", "", one.process), []).append(_address(one))
    exposures = [
        Exposure(severity=Severity.HIGH, where=process, what=f"{process} listens beyond loopback", by=addresses)
        for process, addresses in beyond.items()
    ]
    reason = f"addresses beyond loopback are bound by: {', '.join(sorted(beyond))}"
    facts = len(seen) + len(probes)  # each probe has seen the harness's own socket
    return _finding(facts, exposures, reason, unclear, sockets=len(seen))


def _loopback(address: str) -> bool:
    if address == "localhost":
        return True
    parsed = ipaddress.ip_address(address or EVERY_INTERFACE)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _address(one: Listener) -> str:
    at = f"[{one.address}]:{one.port}" if ":" in one.address else f"{one.address}:{one.port}"
    return at if one.shipped is None else f"{one.shipped or EVERY_INTERFACE} as shipped (here {at})"


BOUND_TO_LOOPBACK = Check(
    name="bound_to_loopback",
    fault="another machine reaches a port of the stack that asks for no credentials",
    source='vLLM documentation, Security: "All communications between nodes in a multi-node vLLM deployment are insecure by default"',
    judge=_sockets,
)


# --- ports ----------------------------------------------------------------------------------------------------------


def _ports(evidence: Evidence) -> Finding:
    probes = _probes(evidence)
    asked = [address for probe in probes for address in probe.addresses]
    if not asked:
        return untestable(NOT_PROBED)
    seeing = all(a.shared is not None for a in asked if a.port is not None) and all(
        p.canaries.get("ports") for p in probes
    )
    unclear = None if seeing else untestable("a port that two processes share was not told from one that they do not")
    shared: dict[str, list[str]] = {}
    for address in asked:
        if address.shared:
            shared.setdefault(re.sub(r"-\d+", "", address.name), []).append(f"127.0.0.1:{address.port}")
    exposures = [
        Exposure(
            severity=Severity.HIGH,
            where=where,
            what=f"another process may listen on the port of {where} too, and gets a part of its requests",
            by=ports,
        )
        for where, ports in shared.items()
    ]
    return _finding(len(asked), exposures, f"ports are shared: {', '.join(sorted(shared))}", unclear, ports=len(asked))


PORT_HELD_ALONE = Check(
    name="port_held_alone",
    fault="two stacks that start on one machine take the same port, and requests and weights of one reach the other",
    source="SkyRL, find_and_reserve_port(): no other process can claim the same port between discovery and actual server startup; "
    "Linux manual, socket(7), SO_REUSEPORT",
    judge=_ports,
)
