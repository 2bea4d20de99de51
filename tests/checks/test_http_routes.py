"""Routes of an address: there, refused as HTTP says, or broken."""

import pytest

from harness.checks.http_routes import HTTP_ROUTES, NOWHERE
from harness.records.verdict import Effect
from tests.checks.scene import Scene
from tests.traces import error


def asked(method="GET", path="/v1/models", status=200, headers=(), failure=None) -> Scene:
    scene = Scene()
    result = {"status": status, "headers": dict(headers), "body": ""}
    call = scene.call("http", {"method": method, "path": path, "headers": {}, "body": ""}, result)
    scene.change(call, label=f"{method} {path}", **({"result": None, "error": failure} if failure else {}))
    return scene


@pytest.mark.parametrize(
    ("about", "effect", "status"),
    [
        ({}, Effect.AS_USUAL, "pass"),
        ({"status": 422}, Effect.AS_USUAL, "pass"),
        ({"status": 404}, Effect.NO_ROUTE, "pass"),
        ({"status": 405, "headers": {"Allow": "POST"}}, Effect.NO_ROUTE, "pass"),
        ({"status": 405}, Effect.NO_ROUTE, "fail"),
        ({"status": 502}, Effect.BROKE, "fail"),
        ({"failure": error("RemoteProtocolError", "closed")}, Effect.BROKE, "fail"),
        ({"path": NOWHERE}, Effect.AS_USUAL, "fail"),
        ({"path": NOWHERE, "method": "OPTIONS"}, Effect.AS_USUAL, "pass"),
        ({"path": NOWHERE, "status": 404}, Effect.NO_ROUTE, "pass"),
    ],
)
def test_an_answer(about, effect, status):
    found = asked(**about).judge(HTTP_ROUTES)
    assert ([one.effect for one in found.effects], found.status) == ([effect], status)


def test_without_a_case_nothing_is_known():
    assert Scene().judge(HTTP_ROUTES).status == "untestable"
