"""Clients that are made again, closed, dropped, or used in several loops: every call ends well or by name, and nothing is left."""

from __future__ import annotations

from typing import Any

from harness.checks.base import EVERY, Check, Evidence, Finding, concluded, untestable
from harness.checks.errors import breaks, error_of
from harness.checks.matching import WITH_ROWS
from harness.contract.faults import ROWS, Fact
from harness.contract.messages import NOBODY
from harness.records.recording import saying

CLOSED = "closed"
"""Label of calls that are in flight while their client is closed, or that come after it: they may fail, by name."""
CONFIGURED = "configured"
"""Label of calls of a client that is made of the configuration."""


def _judge(evidence: Evidence) -> Finding:
    changes = evidence.succeeded("client_life")
    calls = [call for call in evidence.calls() if call.method in WITH_ROWS]
    if not evidence.calls("client_life") or not calls:
        return untestable("no client began or ended, or nothing was asked of any")
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in evidence.calls("client_life"):
        if (error := call.error) is not None:
            said = saying(error.kind, error.message, error.status)
            wrong.append(
                (f"no client is made {call.request['life']}: {said}", {"call": call.id, "asked": call.request})
            )
    for call in calls:
        kind, message, status = error_of(call)
        if kind is None:
            continue
        said, closed = saying(kind, message, status), call.label == CLOSED
        if closed and breaks(kind, message, status):
            wrong.append(
                (f"{call.method}() of a closed client fails without a name, or not in time: {said}", {"call": call.id})
            )
        elif call.label == CONFIGURED:
            wrong.append((f"{call.method}() of the configuration's client fails: {said}", {"call": call.id}))
        elif not closed:
            wrong.append((f"{call.method}() fails beside other clients, or after one: {said}", {"call": call.id}))
    for change in changes:
        wrong += [
            (f"clients leave behind: {said}", {"call": change.id}) for said in (change.result or {}).get("left", ())
        ]
    return concluded(len(calls) + len(changes), wrong)


CLIENT_LIVES = Check(
    name="client_lives",
    fault="a call fails or never ends since another client began or ended, a client that is gone leaves something open, or the client "
    "that the configuration makes does not reach its engines",
    next_step="look at what the client opens lazily, and for which loop: whoever drops or replaces it has to close it",
    reads=Fact.ERRORS,
    falsifies=Fact.ERRORS | ROWS,
    errors_of=EVERY,
    source='SkyRL #904: "Serializable"; SkyRL, RemoteInferenceClient.teardown: "Close HTTP session"; asyncio documentation, '
    "loop.call_exception_handler",
    judge=_judge,
)


ADDRESS_KEYS = ("remote_urls", "run_engines_locally", "external_proxy_url", "external_server_urls")
"""Keys of the configuration under which implementations have the addresses of servers."""


def _judge_addresses(evidence: Evidence) -> Finding:
    made = evidence.calls("client_life")
    asked = [call for call in made if call.request["names"] in (ANOTHERS, NOBODYS)]
    wrong = []
    for call in asked:
        kind, message, status = error_of(call)
        shown = {"call": call.id, "said": saying(kind or "nothing", message, status)}
        if call.request["names"] == ANOTHERS:
            if kind is not None and not any(key in message for key in ADDRESS_KEYS):
                wrong.append(
                    ("addresses under another implementation's keys are neither used nor refused by name", shown)
                )
            continue
        first = next((c for c in evidence.calls("generate") if c.started_ns > call.started_ns), None)
        if kind is None and first is not None:  # a client may find out with its first request
            message = error_of(first)[1]
        if NOBODY not in message:
            wrong.append(("no error names the address of a server that does not answer", shown))
    return concluded(len(asked), wrong)


def _judge_port(evidence: Evidence) -> Finding:
    asked = [call for call in evidence.calls("client_life") if call.request["port_taken"]]
    wrong: list[tuple[str, dict[str, Any]]] = []
    for call in asked:
        kind, message, status = error_of(call)
        if kind is None:
            wrong.append(
                ("a client is made although its address cannot listen at the configured port", {"call": call.id})
            )
        elif not any(word in message.lower() for word in ("port", "address already in use")):
            shown = {"call": call.id, "said": saying(kind, message, status)}
            wrong.append(("the error about a configured port that is taken does not say so", shown))
    return concluded(len(asked), wrong)


TAKEN_PORT = Check(
    name="taken_port",
    fault="an address listens silently at another port than the configured one, or not at all: callers reach another process",
    next_step="look at what becomes of the configured port, and of the error of its bind()",
    reads=Fact.ERRORS,
    errors_of=EVERY,
    source="SkyRL documentation, Configuration Overview: http_endpoint_port, router_init_kwargs; vllm-router documentation, --port",
    judge=_judge_port,
)

ANOTHERS = "another's"
"""`ClientLifeRequest.names` of addresses under the keys of another implementation."""
NOBODYS = "nobody's"
"""`ClientLifeRequest.names` of an address at which nobody answers."""
ADDRESSES = Check(
    name="addresses",
    fault="the addresses of a user's servers are ignored without a word, or the one that does not answer is not named",
    next_step="look at who compares the keys of the configuration with those that this implementation reads, and at who waits for "
    "the servers",
    reads=Fact.ERRORS,
    errors_of=EVERY,
    source="SkyRL documentation, Configuration Overview: remote_urls, run_engines_locally, external_proxy_url, external_server_urls",
    judge=_judge_addresses,
)
