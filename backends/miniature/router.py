"""Routes a client's requests to servers: sessions stick, other requests are spread at random."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
from typing import Any

from backends.miniature.engine import Engine, EngineDead, Output
from harness.contract.messages import BROKEN_HOP_SAYS, HopFault, HttpRequest, Listener, SessionId
from harness.driving.probing import JSON, PICKLE, PLAIN_PICKLE, Route

HOP_S = 0.0002
"""Shortest time of the hop to a server (seconds, on the loop's clock). The longest is twice that."""

ROUTES = (
    Route("control", "POST", "/pause", "{}"),
    Route("control", "POST", "/resume", "{}"),
    Route("control", "GET", "/is_paused"),
    Route("control", "POST", "/sleep", "{}"),
    Route("control", "POST", "/wake_up", "{}"),
    Route("control", "POST", "/reset_prefix_cache", "{}"),
    Route("control", "POST", "/collective_rpc", "{}"),
    Route("weights", "POST", "/update_weights", "{}"),
    Route("weights", "POST", "/v1/load_lora_adapter", "{}"),
    Route("information", "GET", "/get_world_size"),
)
"""Servers' routes that the data plane's address must not expose."""

PICKLES = (PLAIN_PICKLE, (HttpRequest(path="/update_weights", headers=JSON, body=json.dumps({"handles": PICKLE})),))


CALLS = {"pause_generation": "pause", "resume_generation": "resume"}
CALLS |= {op: op for op in ("sleep", "wake_up", "reset_prefix_cache")} | {"add_lora": "load_lora_adapter"}
"""Operation of an engine → call of `HopFault`."""


class HopBroken(ConnectionError):
    """A request or its answer met a broken hop."""

    def __init__(self, fault: HopFault, server: str = "") -> None:
        kept, at = fault.connection == "kept", f" at {server}" if server else ""
        super().__init__(f"{fault.status}: {BROKEN_HOP_SAYS}{at}" if kept else f"connection {fault.connection}{at}")
        self.status = fault.status if kept else None
        self.untaken = fault.hop == "router" and fault.moment == "before" and not kept
        """True if the client's own connection broke before the router took the request."""


class Router:
    """The data plane's address."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        self.engines = engines
        self.fired = 0
        self._random = random.Random(f"router {seed}")
        self.broken: HopFault | None = None
        self.struck: list[str] = []
        """Names of what the fault has struck: the router, or a server."""
        self.over = asyncio.Event()
        """Set when the fault is over."""
        self.dead = False

    def kill(self) -> None:
        """Kill the router, as SIGKILL to its process does."""
        self.dead = True
        for engine in self.engines:
            engine.cut_off()

    def refuse_if_dead(self) -> None:
        """Raises EngineDead if nothing listens at the router's address any more."""
        if self.dead:
            raise EngineDead("the router died")

    async def generate(
        self,
        session: SessionId | None,
        prompt: list[int],
        params: dict[str, Any],
        *,
        engine: Engine | None = None,
        **more: Any,
    ) -> Output:
        """Send one request to its session's server, or to `engine`. Raises EngineDead if that server, or every server, is dead."""
        self.refuse_if_dead()
        await asyncio.sleep(HOP_S * (1 + self._random.random()))
        return await self.forward(self.server_of(session) if engine is None else engine, prompt, params, **more)

    async def forward(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if self.broken is None:
            return await engine.generate(prompt, params, **more)
        return await self.over_broken_hop(engine, prompt, params, **more)

    async def over_broken_hop(self, engine: Engine, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        """One request while a hop is broken, perhaps its own."""
        fault = self.strikes(engine, params)
        if fault is None or fault.connection == "whole":
            return await engine.generate(prompt, params, **more)
        if fault.connection == "hanging":
            await self.over.wait()
            return await engine.generate(prompt, params, **more)
        if fault.moment == "before":
            raise HopBroken(fault)
        await engine.generate(prompt, params, **more)
        raise HopBroken(fault)

    def strikes(self, engine: Engine, params: dict[str, Any]) -> HopFault | None:
        """The fault of a hop that this request meets. The clean room's canary, of one token, meets none."""
        where = "router" if self.broken is not None and self.broken.hop == "router" else engine.name
        if (
            self.broken is None
            or self.broken.call != "request"
            or where in self.struck
            or params.get("max_tokens") == 1
        ):
            return None
        self.struck.append(where)
        return self.broken

    async def control(self, engine: Engine, op: str, **arguments: Any) -> None:
        """One control call to one server."""
        if self.broken is None:
            await engine.control(op, **arguments)
        else:
            await self.control_over_broken_hop(engine, op, **arguments)

    async def control_over_broken_hop(self, engine: Engine, op: str, **arguments: Any) -> None:
        """One control call while a hop is broken, perhaps its own: that to the first server."""
        fault = self.broken
        if fault is None or CALLS.get(op) != fault.call or engine is not self.engines[0] or engine.name in self.struck:
            await engine.control(op, **arguments)
            return
        self.struck.append(engine.name)
        if fault.moment == "after" or fault.connection == "whole":
            await engine.control(op, **arguments)
        if fault.connection != "whole":
            raise HopBroken(fault, engine.name)

    def read_over_hops(self, call: str) -> None:
        """A call that only reads, on its way to all servers. Raises HopBroken."""
        fault, first = self.broken, self.engines[0].name
        if fault is None or fault.call != call or first in self.struck:
            return
        self.struck.append(first)
        if fault.connection != "whole":
            raise HopBroken(fault, first)

    def server_of(self, session: SessionId | None) -> Engine:
        """The server of a session. Without a session, any living server."""
        if session is not None:
            return self.server_of_session(session)
        alive = [engine for engine in self.engines if not engine.dead]
        if not alive:
            raise EngineDead("no server is alive")
        return self._random.choice(alive)

    def server_of_session(self, session: SessionId) -> Engine:
        """SkyRL #934: hash_with_sha256(str(session_id)) % engines."""
        return self.engines[self.hashed(session) % len(self.engines)]

    def finish_session(self, session: SessionId) -> None:
        """SkyRL 0.3.0, RemoteInferenceClient.finish_session: a policy that keeps no sessions has nothing to do."""

    def hashed(self, session: SessionId) -> int:
        return int.from_bytes(hashlib.sha256(str(session).encode()).digest()[:8], "big")

    def healthy(self) -> bool:
        """SkyRL #899, review of /health: true if at least one engine is healthy."""
        return any(not engine.dead for engine in self.engines)

    def asked(self, _request: HttpRequest) -> int:
        """The status of the answer to a request outside the data plane."""
        return 404

    def shared(self, _request: HttpRequest) -> dict[str, str]:
        """Headers of the answer to such a request: none that lets pages of other origins call."""
        return {}

    def bound(self) -> socket.socket:
        """The socket that it listens on while its address is probed. It has none at other times, since it runs in its caller's
        process."""
        return socket.create_server(("127.0.0.1", 0))

    def listeners(self) -> list[Listener]:
        """Further listening sockets: none."""
        return []
