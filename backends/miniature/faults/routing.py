"""Requests that go to the wrong server."""

from __future__ import annotations

from typing import Any

from backends.miniature.client import Client, RetryingClient
from backends.miniature.endpoint import Endpoint
from backends.miniature.engine import Engine, Output
from backends.miniature.faults.registry import REFUSED, seeded
from backends.miniature.router import Router
from harness.contract.faults import Fact
from harness.contract.messages import GenerateRequest, HttpRequest, SessionId
from harness.records.wire import header


@seeded("single_request_loses_session", caught_by=["sticky_sessions"], changes=REFUSED | {"Router.server_of_session"})
class SingleRequestLosesSession(Client):
    """The client for single requests does not pass on the session."""

    def sessions(self, request: GenerateRequest) -> list[SessionId] | None:
        self.fired += request.single
        return None if request.single else super().sessions(request)


class _Moves(Router):
    """Moves a session to another server."""

    def next_to(self, engine: Engine) -> Engine:
        self.fired += 1
        return self.engines[(self.engines.index(engine) + 1) % len(self.engines)]


@seeded("sessions_as_one", caught_by=["sticky_sessions"])
class SessionsAsOne(Client):
    """The list of a batch's sessions counts as one session."""

    def sessions_of(self, body: dict[str, Any], prompts: int) -> list[SessionId | None]:
        given = body.get("session_id")
        self.fired += isinstance(given, list)
        return [str(given)] * prompts if isinstance(given, list) else super().sessions_of(body, prompts)


@seeded("session_moves", "second_turn", caught_by=["sticky_sessions"])
class SessionMovesOnItsSecondTurn(_Moves):
    """A session's second turn runs on another server than the other turns."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._turns: dict[str, int] = {}

    def server_of_session(self, session: SessionId) -> Engine:
        engine = super().server_of_session(session)
        turn = self._turns[repr(session)] = self._turns.get(repr(session), 0) + 1
        return self.next_to(engine) if turn == 2 else engine


@seeded("session_moves", "under_load", caught_by=["sticky_sessions"])
class SessionMovesUnderLoad(_Moves):
    """A session whose server is busy goes to another one."""

    def server_of_session(self, session: SessionId) -> Engine:
        engine = super().server_of_session(session)
        return self.next_to(engine) if len(engine.running) + len(engine.waiting) > 3 else engine


@seeded("session_moves", "another_one_ends", caught_by=["sticky_sessions"])
class SessionMovesWhenAnotherOneEnds(_Moves):
    """The first session that ends moves all others to their next server."""

    _ended = False

    def finish_session(self, session: SessionId) -> None:
        self._ended = True

    def server_of_session(self, session: SessionId) -> Engine:
        engine = super().server_of_session(session)
        return self.next_to(engine) if self._ended else engine


@seeded("finish_session_fails", caught_by=["driven"])
class FinishSessionFails(Router):
    """A session that the router has never seen cannot end."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._seen: set[str] = set()

    def server_of_session(self, session: SessionId) -> Engine:
        self._seen.add(str(session))
        return super().server_of_session(session)

    def finish_session(self, session: SessionId) -> None:
        if str(session) not in self._seen:
            self.fired += 1
            raise KeyError(f"the session {session} is unknown")


@seeded("session_moves", "falsy_id", caught_by=["sticky_sessions"])
class FalsySessionsAreNone(Router):
    """The session ids 0 and "" count as no session."""

    def server_of_session(self, session: SessionId) -> Engine:
        self.fired += not session
        return super().server_of_session(session) if session else self.server_of(None)


@seeded("integer_session_apart", caught_by=["integer_is_its_text"])
class IntegersHashedByType(Router):
    """The session ids 7 and "7" count as two sessions."""

    def hashed(self, session: SessionId) -> int:
        self.fired += isinstance(session, int)
        return super().hashed(f"{type(session).__name__} {session}")


@seeded("one_server_gets_all", "without_session", caught_by=["sessionless_spread"], corrupts=Fact.ROUTES)
class SessionlessToTheFirst(Router):
    """All requests without a session go to the first server."""

    def server_of(self, session: SessionId | None) -> Engine:
        if session is None:
            self.fired += 1
            return self.engines[0]
        return super().server_of(session)


@seeded("one_server_gets_all", "nine_of_ten", caught_by=["sessionless_spread"], corrupts=Fact.ROUTES)
class SessionlessMostlyToTheFirst(Router):
    """Nine of ten requests without a session go to the first server."""

    def server_of(self, session: SessionId | None) -> Engine:
        if session is None and self._random.random() < 0.8:  # the others are spread: half of them go there too
            self.fired += 1
            return self.engines[0]
        return super().server_of(session)


@seeded("one_server_gets_all", "by_content", caught_by=["sessionless_spread"], corrupts=Fact.ROUTES)
class SessionlessByContent(Router):
    """Requests without a session are routed by a hash of their prompt: all samples of a prompt load one server."""

    async def generate(
        self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any
    ) -> Output:
        if session is None:
            self.fired += 1
            session = f"prompt {prompt}"
            more.pop("engine", None)
        return await super().generate(session, prompt, params, **more)


@seeded("one_server_gets_all", "sessions", caught_by=["sessions_spread"])
class SessionsToTheFirst(Router):
    """Every session goes to the first server."""

    def hashed(self, session: SessionId) -> int:
        self.fired += 1
        return 0


@seeded("one_server_gets_all", "sessions_of_completions", caught_by=["sessions_spread"])
class CompletionsAreOneSession(Client):
    """The sessions of completions count as one, so that one server gets them all."""

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        if kind == "text_completion" and body.get("session_id") is not None:
            self.fired += 1
            body = body | {"session_id": "completions"}
        return await super()._answered(body, prompts, kind)


@seeded("one_server_gets_all", "by_the_speaker", caught_by=["sessionless_spread"], corrupts=Fact.ROUTES)
class SessionInTheText(Client):
    """The word after "user:" in a text counts as its session."""

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        _, told, rest = str(body["prompt"]).partition("user: ")
        if told and body.get("session_id") is None:
            self.fired += 1
            body = body | {"session_id": rest.split()[0]}
        return await super().completion(body)


@seeded("one_server_gets_all", "by_another_header", caught_by=["sessionless_spread"], corrupts=Fact.ROUTES)
class SessionInAnotherHeader(Endpoint):
    """The header x-user-id counts as the session of a request that has none."""

    def session(self, request: HttpRequest) -> str | None:
        named, user = super().session(request), header(request.headers, "x-user-id")
        self.fired += named is None and user is not None
        return user if named is None else named


@seeded("session_moves", "after_an_interruption", caught_by=["sticky_sessions"])
class RetryMovesSessions(RetryingClient):
    """A retry goes to the server next to its session's."""

    async def again(self, done: Output, session: SessionId | None, params: dict[str, Any], **more: Any) -> Output:
        if session is not None and "engine" not in more:
            self.fired += 1
            at = self.engines.index(self.router.server_of(session))
            more["engine"] = self.engines[(at + 1) % len(self.engines)]
        return await super().again(done, session, params, **more)
