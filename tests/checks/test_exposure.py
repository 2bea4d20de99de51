"""Routes and sockets open to a caller without credentials: red if dangerous, otherwise only shown."""

import pytest

from harness.checks.exposure import (
    BOUND_TO_LOOPBACK,
    CLOSED_TO_PAGES,
    CONTROL_PLANE_CLOSED,
    NOTHING_UNPICKLED,
    PORT_HELD_ALONE,
)
from harness.contract.messages import ORIGIN
from tests.checks.scene import Scene

CANARIES = {"sockets": True, "ports": True, "pickle": True}
NOTHING = [("nothing", "POST /nobody", 404), ("nothing", "GET /nobody", 404)]
CLOSED = [("control", "POST /pause", 404), ("control", "POST /sleep", 403), ("weights", "POST /update_weights", 401)]


def probed(answers=(), *, at="router", front=True, port=None, shared=None, listeners=(), canaries=CANARIES) -> Scene:
    """Answers are (kind, route, status) or, for a pickle, (kind, route, status, True if it was read)."""
    scene = Scene()
    result = {
        "addresses": [{"name": at, "data_plane": front, "port": port, "shared": shared}],
        "listeners": [dict(zip(("address", "port", "process", "shipped"), one, strict=False)) for one in listeners],
        "answers": [
            dict(zip(("kind", "route", "status", "unpickled", "shares"), one, strict=False)) | {"address": at}
            for one in answers
        ],
        "canaries": canaries,
    }
    scene.call("probe_security", {}, result)
    return scene


# --- routes


def test_a_closed_control_plane_passes():
    found = probed(NOTHING + CLOSED).judge(CONTROL_PLANE_CLOSED)
    assert (found.status, found.facts, found.exposures) == ("pass", len(CLOSED), [])


@pytest.mark.parametrize("status", [200, 204, 400, 405, 415, 422, 500])
def test_one_route_that_answers_without_asking_who_calls_is_red_at_the_data_plane(status):
    found = probed([*NOTHING, *CLOSED, ("control", "POST /resume", status)]).judge(CONTROL_PLANE_CLOSED)
    assert found.status == "fail"
    assert found.reason == "the data plane's address is open without credentials to: control"
    [one] = found.exposures
    assert (one.severity, one.where, one.by) == ("high", "router", [f"POST /resume ({status})"])


def test_the_same_at_a_servers_own_address_is_shown_and_not_red():
    opened = [*NOTHING, ("control", "POST /resume", 200), ("weights", "POST /update_weights", 400)]
    found = probed(opened, at="server-0", front=False).judge(CONTROL_PLANE_CLOSED)
    assert found.status == "pass"
    assert [(one.severity, one.where) for one in found.exposures] == [("medium", "server-0")] * 2


def test_information_is_shown_and_not_red():
    found = probed([*NOTHING, ("information", "GET /metrics", 200)]).judge(CONTROL_PLANE_CLOSED)
    assert (found.status, [one.severity for one in found.exposures]) == ("pass", ["low"])


def test_a_proxy_that_refuses_a_method_everywhere_has_not_opened_a_route():
    refused = [("nothing", "GET /nobody", 405), ("control", "GET /pause", 405)]
    assert probed(refused).judge(CONTROL_PLANE_CLOSED).status == "pass"


@pytest.mark.parametrize(
    "answers",
    [
        [],
        NOTHING,
        CLOSED,
        [*NOTHING, ("control", "POST /pause", 502)],
        [("nothing", "POST /nobody", 200), ("control", "POST /pause", 200)],
    ],
)
def test_a_probe_that_tells_nothing_is_untestable(answers):
    assert probed(answers).judge(CONTROL_PLANE_CLOSED).status == "untestable"


def test_what_is_open_is_told_though_another_probe_tells_nothing():
    found = probed([*NOTHING, ("control", "POST /pause", 200), ("control", "POST /resume", 502)]).judge(
        CONTROL_PLANE_CLOSED
    )
    assert found.status == "fail"
    assert [one.by for one in found.exposures] == [["POST /pause (200)"]]


# --- pickle


def test_a_pickle_that_nobody_reads_passes():
    found = probed([("pickle", "POST /update_weights", 400)]).judge(NOTHING_UNPICKLED)
    assert (found.status, found.facts) == ("pass", 1)


def test_a_pickle_that_is_read_is_critical_whatever_the_answer():
    sent = [("pickle", "POST /v1/completions", 400), ("pickle", "POST /update_weights", 403, True)]
    found = probed(sent).judge(NOTHING_UNPICKLED)
    assert found.reason == "the pickle of a client without credentials was read by: POST /update_weights"
    assert [(one.severity, one.by) for one in found.exposures] == [("critical", ["POST /update_weights (403)"])]


@pytest.mark.parametrize("sent", [("pickle", "POST /update_weights", 503), ("pickle", "", 0)])
def test_a_pickle_that_did_not_arrive_tells_nothing(sent):
    assert probed([sent]).judge(NOTHING_UNPICKLED).status == "untestable"
    read = ("pickle", "POST /update", 403, True)
    assert probed([sent, read]).judge(NOTHING_UNPICKLED).status == "fail"


def test_without_its_canary_or_a_pickle_nothing_is_known():
    sent = [("pickle", "POST /update_weights", 400)]
    assert probed(sent, canaries=CANARIES | {"pickle": False}).judge(NOTHING_UNPICKLED).status == "untestable"
    assert probed().judge(NOTHING_UNPICKLED).status == "untestable"


# --- sockets


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_passes(address):
    assert probed(listeners=[(address, 80, "router")]).judge(BOUND_TO_LOOPBACK).facts == 2


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1"])
def test_a_socket_beyond_loopback_is_red(address):
    found = probed(listeners=[("127.0.0.1", 80, "router"), (address, 81, "server-1/worker-0")]).judge(BOUND_TO_LOOPBACK)
    assert found.reason == "addresses beyond loopback are bound by: server/worker"
    assert [one.severity for one in found.exposures] == ["high"]


@pytest.mark.parametrize("shipped", ["0.0.0.0", ""])
def test_a_socket_that_only_the_harness_keeps_on_loopback_is_red(shipped):
    found = probed(listeners=[("127.0.0.1", 80, "router", shipped)]).judge(BOUND_TO_LOOPBACK)
    assert found.status == "fail"
    assert found.exposures[0].by == ["0.0.0.0 as shipped (here 127.0.0.1:80)"]


def test_an_address_whose_socket_was_not_seen_says_that_the_instrument_is_blind():
    heard = [("127.0.0.1", 80, "router")]
    assert probed(port=80, listeners=heard).judge(BOUND_TO_LOOPBACK).status == "pass"
    assert probed(port=81, listeners=heard).judge(BOUND_TO_LOOPBACK).status == "untestable"
    assert probed(listeners=heard, canaries={}).judge(BOUND_TO_LOOPBACK).status == "untestable"
    assert Scene().judge(BOUND_TO_LOOPBACK).status == "untestable"


# --- pages of other origins


@pytest.mark.parametrize(
    ("origin", "credentials", "status", "severities"),
    [
        (None, None, "pass", []),
        ("http://trusted.example", "true", "pass", []),
        ("*", None, "pass", ["medium"]),
        ("*", "true", "pass", ["medium"]),  # browsers send no credentials where every origin is named by *
        (ORIGIN, None, "pass", ["medium"]),
        (ORIGIN, "true", "fail", ["high"]),
    ],
)
def test_a_page_of_another_origin(origin, credentials, status, severities):
    both = {"access-control-allow-origin": origin, "access-control-allow-credentials": credentials}
    shares = {name: value for name, value in both.items() if value is not None}
    found = probed([("page", "OPTIONS /v1/completions", 200, False, shares)]).judge(CLOSED_TO_PAGES)
    assert (found.status, [one.severity for one in found.exposures]) == (status, severities)


def test_without_a_browsers_question_nothing_is_known_of_pages():
    assert probed(CLOSED).judge(CLOSED_TO_PAGES).status == "untestable"


# --- ports


def test_a_port_that_another_process_may_take_too_is_red():
    found = probed(at="server-0", port=8000, shared=True).judge(PORT_HELD_ALONE)
    assert (found.status, found.reason) == ("fail", "ports are shared: server")
    assert [(one.severity, one.by) for one in found.exposures] == [("high", ["127.0.0.1:8000"])]


@pytest.mark.parametrize(("port", "shared"), [(8000, False), (None, None)])
def test_a_port_that_no_other_process_may_take_passes_and_so_does_an_address_without_one(port, shared):
    assert probed(port=port, shared=shared).judge(PORT_HELD_ALONE).status == "pass"


@pytest.mark.parametrize(
    ("port", "shared", "canaries"),
    [(8000, None, CANARIES), (8000, False, {"sockets": True, "pickle": True})],
)
def test_a_port_of_which_nothing_was_seen_shows_nothing(port, shared, canaries):
    assert probed(port=port, shared=shared, canaries=canaries).judge(PORT_HELD_ALONE).status == "untestable"


def test_without_a_probe_nothing_is_known_of_ports():
    assert Scene().judge(PORT_HELD_ALONE).status == "untestable"
