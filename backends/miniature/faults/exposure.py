"""Addresses that expose routes or sockets to callers without credentials."""

from __future__ import annotations

import base64
import json
import pickle
import socket

from backends.miniature.faults.registry import seeded
from backends.miniature.router import ROUTES, Router
from harness.contract.messages import HttpRequest, Listener

THERE = {route.path: route.kind for route in ROUTES}


@seeded("control_plane_exposed", "every_route", caught_by=["control_plane_closed"])
class ControlPlaneExposed(Router):
    """The data plane's address passes control calls on to the servers."""

    def asked(self, request: HttpRequest) -> int:
        if request.path not in THERE:
            return super().asked(request)
        self.fired += 1
        return 200


@seeded("control_plane_exposed", "one_route", caught_by=["control_plane_closed"])
class PauseExposed(Router):
    """The data plane's address passes pauses on to the servers."""

    def asked(self, request: HttpRequest) -> int:
        self.fired += request.path == "/pause"
        return 200 if request.path == "/pause" else super().asked(request)


@seeded("control_plane_exposed", "weights", caught_by=["control_plane_closed"])
class WeightsExposed(Router):
    """The data plane's address checks the body of a weight update before the caller's credentials: 400, not 401."""

    def asked(self, request: HttpRequest) -> int:
        if THERE.get(request.path) != "weights":
            return super().asked(request)
        self.fired += 1
        return 400


@seeded("control_plane_exposed", "wrong_method", caught_by=["control_plane_closed"])
class MethodBeforeCredentials(Router):
    """The data plane's address answers 405 on one route before it checks credentials, which shows that the route exists."""

    def asked(self, request: HttpRequest) -> int:
        self.fired += request.path == "/is_paused"
        return 405 if request.path == "/is_paused" else super().asked(request)


@seeded("pickle_read", "in_json", caught_by=["nothing_unpickled"])
class WeightUpdatesUnpickled(Router):
    """The data plane's address unpickles the body of a weight update before it answers 403."""

    def asked(self, request: HttpRequest) -> int:
        if request.path == "/update_weights" and "handles" in (body := json.loads(request.body)):
            self.fired += 1
            pickle.loads(base64.b64decode(body["handles"]))
            return 403
        return super().asked(request)


@seeded("pickle_read", "whole_body", caught_by=["nothing_unpickled"])
class BodiesUnpickled(Router):
    """A binary body is unpickled."""

    def asked(self, request: HttpRequest) -> int:
        if request.headers.get("content-type") == "application/octet-stream":
            self.fired += 1
            pickle.loads(request.body.encode())
        return super().asked(request)


@seeded("open_to_pages", caught_by=["closed_to_pages"])
class OpenToPages(Router):
    """Every origin is echoed, and credentials are allowed."""

    def shared(self, request: HttpRequest) -> dict[str, str]:
        origin = request.headers.get("origin")
        if origin is None:
            return super().shared(request)
        self.fired += 1
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Credentials": "true"}


class _Bound(Router):
    """Reports a bound socket without binding one, because this suite never listens beyond loopback."""

    address = "127.0.0.1"
    shipped: str | None = None

    def listeners(self) -> list[Listener]:
        self.fired += 1
        return [Listener(address=self.address, port=8001, process="server-0", shipped=self.shipped)]


@seeded("bound_beyond_loopback", "every_interface", caught_by=["bound_to_loopback"])
class BoundToEveryInterface(_Bound):
    """A server listens on all interfaces."""

    address = "0.0.0.0"


@seeded("bound_beyond_loopback", "ipv6", caught_by=["bound_to_loopback"])
class BoundToEveryInterfaceOfIpv6(_Bound):
    """A server listens on all interfaces through an IPv6 socket."""

    address = "::"


@seeded("bound_beyond_loopback", "as_shipped", caught_by=["bound_to_loopback"])
class BoundElsewhereAsShipped(_Bound):
    """A server listens on loopback only because the harness changed its address."""

    shipped = "0.0.0.0"


@seeded("port_shared", caught_by=["port_held_alone"])
class PortShared(Router):
    """The data plane's address listens so that another process can listen on the same port."""

    def bound(self) -> socket.socket:
        self.fired += 1
        return socket.create_server(("127.0.0.1", 0), reuse_port=True)
