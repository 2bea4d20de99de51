"""What the data plane's address lets through: generation, and nothing that controls the servers behind it."""

from __future__ import annotations

from harness.checks.base import Check, Evidence, Finding, failed, passed, untestable

CLOSED = frozenset({401, 403, 404, 405})
"""HTTP statuses of a route that is not there, or not for this caller (RFC 9110, section 15.5)."""


def _judge(evidence: Evidence) -> Finding:
    probes = [call for call in evidence.calls("probe_router") if call.error is None]
    routes = {route: status for call in probes for route, status in sorted((call.result or {})["routes"].items())}
    if not routes:
        return untestable("no control-plane route was probed at the data plane's address")
    opened = [{"route": route, "status": status} for route, status in routes.items() if 200 <= status < 300]
    if opened:
        return failed(len(routes), "the data plane's address answers a control-plane route with success", opened)
    unclear = [{"route": route, "status": status} for route, status in routes.items() if status not in CLOSED]
    if unclear:
        return untestable("a probe was neither let through nor turned away", evidence=unclear)
    return passed(len(routes))


CONTROL_PLANE_CLOSED = Check(
    name="control_plane_closed",
    fault="whoever may generate may also pause the servers, put them to sleep or change their weights",
    source='SkyRL #904: "Router (InferenceRouter): Data plane only"; its review on unauthenticated control endpoints',
    judge=_judge,
)
