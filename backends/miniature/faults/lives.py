"""Clients that end badly."""

from __future__ import annotations

import asyncio
from typing import Any

from backends.miniature import tokenizer
from backends.miniature.client import MODEL, Client
from backends.miniature.endpoint import Endpoint
from backends.miniature.engine import Output
from backends.miniature.faults.registry import REFUSED, seeded
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import ClientLifeRequest, SessionId


@seeded("client_lives", "configured_by_another_name", caught_by=["client_lives"], corrupts=ROWS)
class ConfiguredByAnotherName(Client):
    """A client that is made of the configuration asks for the model by its path, and not by the name that engines serve."""

    def configure(self, request: ClientLifeRequest) -> None:
        super().configure(request)
        self.fired += 1
        self.model = f"/checkpoints/{MODEL}"


@seeded("key_not_sent", caught_by=["all_complete"], corrupts=Fact.ANSWERS, changes=frozenset({"Client.bearer"}))
class KeyNotSent(Client):
    """A client does not send the key in its environment, which its own servers ask for."""

    def bearer(self) -> str:
        self.fired += self.key != ""
        return ""


@seeded("client_lives", "texts_by_a_server", caught_by=["detokenize"], changes=frozenset({"Client.read_by_a_server"}))
class TextsByAServer(Client):
    """What a server reads for a client without a tokenizer leaves special tokens out."""

    def read_by_a_server(self, ids: list[int]) -> str:
        text = tokenizer.decode(ids)
        self.fired += text != super().read_by_a_server(ids)
        return text


@seeded("client_lives", "configured_by_a_merged_adapter", caught_by=["client_lives"])
class ConfiguredByAMergedAdapter(Client):
    """A client asks for the configuration's adapter by name, although the trainer merges it into the weights."""

    def configure(self, request: ClientLifeRequest) -> None:
        super().configure(request)
        self.fired += request.merged_adapter
        self.model = "an adapter" if request.merged_adapter else MODEL


@seeded("client_lives", "configured_by_one_address", caught_by=["fan_out"], corrupts=Fact.PAUSES)
class ConfiguredByOneAddress(Client):
    """A client that is told of the proxy alone sends control calls to one server."""

    def configure(self, request: ClientLifeRequest) -> None:
        super().configure(request)
        if request.names == "proxy":
            self.fired += 1
            self.engines = self.engines[:1]


@seeded("client_lives", "another_implementations_addresses", caught_by=["addresses"])
class AnothersAddressesIgnored(Client):
    """Addresses under the keys of another implementation are passed over, and engines are started."""

    def configure(self, request: ClientLifeRequest) -> None:
        super().configure(request)
        if request.names == "another's":
            self.fired += 1
            raise RuntimeError("engines are started")


@seeded("client_lives", "silent_servers_not_named", caught_by=["addresses"])
class SilentServersNotNamed(Client):
    """The error about addresses at which nobody answers names none of them."""

    def configure(self, request: ClientLifeRequest) -> None:
        if request.names == "nobody's":
            self.fired += 1
            raise RuntimeError("the proxy did not become healthy")
        super().configure(request)


@seeded("taken_port_ignored", caught_by=["taken_port"])
class TakenPortIgnored(Client):
    """A client is made although its address cannot listen at the configured port."""

    def listen(self, *, port_taken: bool) -> None:
        self.fired += port_taken


@seeded("client_lives", "asks_an_http_proxy", caught_by=["client_lives"], corrupts=ROWS)
class AsksAnHttpProxy(Client):
    """A client sends its requests to the proxy that the environment names."""

    _proxy = ""

    def configure(self, request: ClientLifeRequest) -> None:
        super().configure(request)
        self._proxy = request.variables.get("HTTP_PROXY", "")

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if not self._proxy:
            return await super().row(session, prompt, params, **more)
        self.fired += 1
        raise ConnectionError(f"cannot connect to {self._proxy}")


@seeded(
    "client_lives",
    "given_up_by_the_proxy",
    caught_by=["client_lives", "all_complete", "kept_through_pause"],
    corrupts=Fact.ANSWERS,
)
class GivenUpByTheProxy(Client):
    """A proxy gives up a request that waits for its answer for longer than a configured limit."""

    _limit_s: int | None = None

    def configure(self, request: ClientLifeRequest) -> None:
        super().configure(request)
        self._limit_s = request.answer_limit_s

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        try:
            async with asyncio.timeout(self._limit_s):
                return await super().row(session, prompt, params, **more)
        except TimeoutError:
            self.fired += 1
            return await self.given_up(session, prompt, params, **more)

    async def given_up(
        self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any
    ) -> Output:
        raise TimeoutError(f"no answer within {self._limit_s} s")


@seeded("client_lives", "asked_again_by_the_client", caught_by=["kept_through_pause"])
class AskedAgainByTheClient(GivenUpByTheProxy):
    """A proxy gives up a request that waits for longer than a limit, and the client asks it again."""

    async def given_up(
        self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any
    ) -> Output:
        return await Client.row(self, session, prompt, params, **more)


@seeded("address_taken_over", caught_by=["sessionless_spread"], corrupts=Fact.ROUTES)
class AddressTakenOver(Endpoint):
    """Another client's address and this one answer through the client that was made last."""

    _last: Client | None = None

    def beside(self, other: Client) -> None:
        self._last = other

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._last is not None:
            self.fired += 1
            self.client = self._last
        return await super().answer(path, body)


@seeded("client_lives", "gone_with_its_owner", caught_by=["client_lives"], corrupts=ROWS)
class GoneWithItsOwner(Client):
    """The servers end when their owner drops all but the client."""

    def alone(self) -> None:
        self.fired += 1
        self.close()


@seeded("client_lives", "leaves_a_session", caught_by=["client_lives"])
class LeavesASession(Client):
    """A client that nobody uses any more leaves its session open."""

    def left(self) -> list[str]:
        self.fired += 1
        return ["Unclosed client session"]


@seeded("client_lives", "closed_without_a_name", caught_by=["client_lives"], changes=REFUSED)
class ClosedWithoutAName(Client):
    """A closed client fails with an error that says nothing."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if self.closed:
            self.fired += 1
            raise RuntimeError
        return await super().row(session, prompt, params, **more)
