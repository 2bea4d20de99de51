"""OpenAI addresses that mislead a user's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from backends.miniature.client import error_body
from backends.miniature.endpoint import Endpoint
from backends.miniature.engine import Engine
from backends.miniature.faults.registry import seeded
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import HttpRequest, HttpResponse
from harness.records.wire import body_of, token_name


@seeded("endpoint_hides_errors", "empty_success", caught_by=["wire.status", "errors.named"], corrupts=Fact.ERRORS)
class ErrorsAreEmpty(Endpoint):
    """An error is answered with an empty body and a success status."""

    def refused(self, body: dict[str, Any]) -> HttpResponse:
        self.fired += 1
        return self.json(200, {})


@seeded("metrics_gone", caught_by=["http_metrics"])
class MetricsGone(Endpoint):
    """A server's metrics lack the series about its engine: they went elsewhere."""

    def metrics(self, engine: Engine) -> HttpResponse:
        self.fired += 1
        whole = super().metrics(engine)
        return HttpResponse(status=whole.status, headers=whole.headers, body="process_cpu_seconds_total 1.0\n")


@seeded("alternatives_misnamed", caught_by=["http_tokens"])
class AlternativesMisnamed(Endpoint):
    """Every alternative of a place has the name of the chosen token."""

    def alternatives(self, chosen: int, top: list[tuple[int, float]]) -> list[dict[str, Any]]:
        self.fired += 1
        return [one | {"token": token_name(chosen)} for one in super().alternatives(chosen, top)]


@seeded("alternatives_of_a_neighbour", caught_by=["http_tokens"])
class NeighboursAlternatives(Endpoint):
    """Beside a request with min_p, one alternative of a place is left."""

    def alternatives(self, chosen: int, top: list[tuple[int, float]]) -> list[dict[str, Any]]:
        whole = super().alternatives(chosen, top)
        if not any("min_p" in request.params for engine in self.client.engines for request in engine.running):
            return whole
        self.fired += 1
        return whole[:1]


@seeded("answers_by_tokens_lost", caught_by=["sampling.independent", "stopping"], corrupts=Fact.ANSWERS)
class LastAnswerAlone(Endpoint):
    """Of several answers by token ids, the last alone is given."""

    def kept(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.fired += len(choices) > 1
        return super().kept(choices[-1:])


@seeded("token_stream_ignored", caught_by=["token_stream"])
class NoTokenStream(Endpoint):
    """A stream of token ids comes as one body."""

    def events_wanted(self, body: dict[str, Any]) -> bool:
        self.fired += super().events_wanted(body)
        return False


@seeded("endpoint_lacks_a_route", "server_error", caught_by=["http_routes", "errors.named"])
class AbsenceBreaks(Endpoint):
    """A route that the address lacks is answered as a server error."""

    def absent(self) -> HttpResponse:
        self.fired += 1
        return self.json(500, {"detail": "Not Found"})


@seeded("endpoint_lacks_a_route", "success", caught_by=["http_routes", "errors.named"])
class AbsenceIsSuccess(Endpoint):
    """A route that the address lacks is answered as if it were there."""

    def absent(self) -> HttpResponse:
        self.fired += 1
        return self.json(200, {})


@seeded("endpoint_hides_errors", "status", caught_by=["refusals", "wire.status"])
class ErrorsAreSuccesses(Endpoint):
    """An error body has a success status."""

    def refused(self, body: dict[str, Any]) -> HttpResponse:
        self.fired += 1
        return self.json(200, body)


@seeded("endpoint_hides_errors", "server_error", caught_by=["wire.status"], corrupts=Fact.ERRORS)
class ErrorsAreAllOurs(Endpoint):
    """Every error has status 500, whatever its body says."""

    def refused(self, body: dict[str, Any]) -> HttpResponse:
        self.fired += 1
        return self.json(500, body)


@seeded("endpoint_hides_errors", "type", caught_by=["wire.status"])
class ErrorsAreOfAnotherType(Endpoint):
    """Every error is of the type of a server error, whatever its code says."""

    def refused(self, body: dict[str, Any]) -> HttpResponse:
        self.fired += 1
        return super().refused({"error": body["error"] | {"type": "InternalServerError"}})


@seeded("endpoint_hides_errors", "message", caught_by=["wire.status"], corrupts=Fact.ERRORS)
class ErrorsSayNothing(Endpoint):
    """An error has a code, and no message."""

    def refused(self, body: dict[str, Any]) -> HttpResponse:
        self.fired += 1
        return super().refused({"error": body["error"] | {"message": None}})


@seeded("address_moves", caught_by=["all_complete"], corrupts=Fact.ANSWERS)
class ElsewhereThanConfigured(Endpoint):
    """Nothing listens at host and port of the configuration."""

    async def configured(self, request: HttpRequest) -> HttpResponse:
        self.fired += 1
        raise ConnectionRefusedError(f"nothing listens where {request.path} was sent")


@seeded("refusal_misleads", "server_error", caught_by=["errors.refused"], corrupts=Fact.ERRORS)
class RefusalBlamesServer(Endpoint):
    """A body without a model is refused as a fault of the server."""

    def refused(self, body: dict[str, Any]) -> HttpResponse:
        if body["error"]["message"] != "the field model is required":
            return super().refused(body)
        self.fired += 1
        return super().refused(error_body("model: internal error", 500))


@seeded("refusal_misleads", "half", caught_by=["errors.refused", "conservation"])
class OnlyPromptsWithSessions(Endpoint):
    """Of a batch with too few sessions, only the prompts with a session are answered."""

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        sessions, prompts = body.get("session_id"), body.get("prompt")
        if isinstance(sessions, list) and isinstance(prompts, list) and isinstance(prompts[0], list):
            self.fired += 1
            body = body | {"prompt": prompts[: len(sessions)]}
        return await super().answer(path, body)


@seeded("endpoint_drops_session", "header", caught_by=["sticky_sessions"])
class NoSessionHeader(Endpoint):
    """The session in the header is not passed on."""

    def session(self, request: HttpRequest) -> str | None:
        self.fired += super().session(request) is not None
        return None


@seeded("endpoint_drops_session", "body", caught_by=["sticky_sessions"])
class NoSessionInTheBody(Endpoint):
    """The session in the body is not passed on."""

    def read(self, request: HttpRequest) -> dict[str, Any] | None:
        body = super().read(request)
        if body is not None and self.session(request) is None:
            self.fired += body.pop("session_id", None) is not None
        return body


@seeded("stream_loses_a_chunk", "first", caught_by=["completion.usage", "chat_completion.usage"], corrupts=Fact.ANSWERS)
class FirstChunkLost(Endpoint):
    """The first event of a stream is not sent."""

    def chunks(self, answer: dict[str, Any], with_usage: bool) -> Iterator[dict[str, Any]]:
        whole = super().chunks(answer, with_usage)
        next(whole)
        self.fired += 1
        yield from whole


@seeded("stream_loses_a_chunk", "last", caught_by=["wire.streams"], corrupts=Fact.ANSWERS)
class StreamBreaksOff(Endpoint):
    """A stream ends before its last piece, its usage and its [DONE]."""

    def stream(self, events: list[str]) -> HttpResponse:
        self.fired += 1
        return super().stream([event for event in events[:-1] if not _ends(json.loads(event))])


def _ends(chunk: dict[str, Any]) -> bool:
    return not chunk["choices"] or any(choice["finish_reason"] for choice in chunk["choices"])


@seeded("stream_is_whole", caught_by=["wire.streams"])
class NoStream(Endpoint):
    """A request for a stream gets one whole body."""

    async def http(self, request: HttpRequest) -> HttpResponse:
        try:
            body = json.loads(request.body)
        except ValueError:
            return await super().http(request)
        if body.pop("stream", False):
            self.fired += 1
        return await super().http(
            HttpRequest(method=request.method, path=request.path, headers=request.headers, body=json.dumps(body))
        )


@seeded("errors_as_streams", caught_by=["wire.status"])
class ErrorsAsStreams(Endpoint):
    """The error of a request for a stream says that it is a stream."""

    async def posted(self, request: HttpRequest) -> HttpResponse:
        answer = await super().posted(request)
        if answer.status < 400 or not body_of(request.body).get("stream"):
            return answer
        self.fired += 1
        return HttpResponse(status=answer.status, headers={"content-type": "text/event-stream"}, body=answer.body)


@seeded("endpoint_logprobs_wrong", "shifted", caught_by=["wire.logprobs"])
class LogprobsShifted(Endpoint):
    """The log-probabilities of a choice are shifted by one: they begin with the second token's."""

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await super().answer(path, body)
        for choice in answer.get("choices") or ():
            for name, values in (choice.get("logprobs") or {}).items():
                if values and name != "tokens":
                    self.fired += 1
                    choice["logprobs"][name] = [*values[1:], values[0]]
        return answer


@seeded("endpoint_fails_after_an_error", caught_by=["wire.answered"], corrupts=Fact.ERRORS | ROWS)
class NeverRecovers(Endpoint):
    """After an error, every further request is refused."""

    _failed = False

    def refused(self, body: dict[str, Any]) -> HttpResponse:
        self._failed = True
        return super().refused(body)

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._failed:
            self.fired += 1
            return {"error": {"message": "the model is not there", "type": "Service Unavailable", "code": 503}}
        return await super().answer(path, body)
