"""Lives of clients: named errors after a close, no failure beside others, nothing left."""

from __future__ import annotations

import pytest

from harness.checks.client_lives import ADDRESSES, ANOTHERS, CLIENT_LIVES, CLOSED, CONFIGURED, TAKEN_PORT
from harness.contract.messages import ClientLifeRequest, ClientLifeResult
from tests import traces
from tests.checks.scene import Scene
from tests.traces import error


def scene(label=None, failed=None, left=()) -> Scene:
    made = Scene()
    made.generate([[10, 11, 12]], label=label)
    if failed is not None:
        made.change(made.calls[-1], result=None, error=failed)
    times = {"started_ns": made.pass_time(), "ended_ns": made.pass_time()}
    request = ClientLifeRequest(life="looked at")
    made.calls.append(traces.call("client_life", request, ClientLifeResult(left=list(left)), **times))
    return made


@pytest.mark.parametrize(
    ("label", "failed", "reason"),
    [
        (None, None, ""),
        (CLOSED, None, ""),
        (CLOSED, error("ClientClosed", "the client is closed"), ""),
        (
            CLOSED,
            error("RuntimeError", ""),
            "generate() of a closed client fails without a name, or not in time: RuntimeError",
        ),
        (
            None,
            error("ClientClosed", "the client is closed"),
            "generate() fails beside other clients, or after one: ClientClosed: the client is closed",
        ),
        (
            CONFIGURED,
            error("NotFoundError", "the model does not exist"),
            "generate() of the configuration's client fails: NotFoundError: the model does not exist",
        ),
    ],
)
def test_calls_of_closed_clients_fail_by_name_and_others_not_at_all(label, failed, reason):
    found = scene(label, failed).judge(CLIENT_LIVES)
    assert (found.status, found.reason) == ("fail" if reason else "pass", reason)


def test_what_a_client_leaves_is_told():
    found = scene(left=["Unclosed client session"]).judge(CLIENT_LIVES)
    assert found.reason == "clients leave behind: Unclosed client session"


def test_nothing_is_told_without_a_life():
    lone = Scene()
    lone.generate([[10, 11, 12]])
    assert lone.judge(CLIENT_LIVES).status == "untestable"


def test_a_client_that_cannot_be_made():
    made = scene()
    made.change(made.calls[-1], result=None, error=error("RuntimeError", "no loop may run"))
    assert made.judge(CLIENT_LIVES).reason == "no client is made looked at: RuntimeError: no loop may run"


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        (None, ""),
        (error("ValueError", "remote_urls is not supported"), ""),
        (
            error("OwnEngines", "engines are started"),
            "addresses under another implementation's keys are neither used nor refused by name",
        ),
    ],
)
def test_addresses_under_anothers_keys(failed, reason):
    made = Scene()
    times = {"started_ns": made.pass_time(), "ended_ns": made.pass_time()}
    request = ClientLifeRequest(life="as configured", names=ANOTHERS)
    made.calls.append(traces.call("client_life", request, ClientLifeResult(), **times))
    if failed is not None:
        made.change(made.calls[-1], result=None, error=failed)
    found = made.judge(ADDRESSES)
    assert (found.status, found.reason) == ("fail" if reason else "pass", reason)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("port 8000 is in use", ""),
        ("[Errno 98] Address already in use", ""),
        ("broken", "the error about a configured port that is taken does not say so"),
        (None, "a client is made although its address cannot listen at the configured port"),
    ],
)
def test_a_configured_port_that_is_taken(said, reason):
    made = Scene()
    call = made.call("client_life", ClientLifeRequest(life="as configured", port_taken=True), ClientLifeResult())
    made.change(call, error=said and error("OSError", said), result=None if said else {"left": []})
    found = made.judge(TAKEN_PORT)
    assert (found.status, found.reason) == ("fail" if reason else "pass", reason)
