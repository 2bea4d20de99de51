"""What a server's metrics tell: its series, and as many tokens as its engine made."""

import pytest

from harness.checks.http_metrics import HTTP_METRICS, SERIES
from tests.checks.scene import Scene

WHOLE = "# HELP\n" + "".join(f'{series}{{engine="0"}} 64.0\n' for series in SERIES)


def asked(body=WHOLE, status=200) -> Scene:
    scene = Scene()
    scene.generate([[10, 11], [12, 13]])
    request = {"method": "GET", "path": "/metrics", "headers": {}, "body": "", "server": "server-0"}
    scene.call("http", request, {"status": status, "headers": {}, "body": body})
    return scene


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({}, ""),
        ({"status": 404, "body": "{}"}, "a server has no /metrics"),
        ({"body": "process_cpu_seconds_total 1.0\n"}, f"the metrics of a server lack {', '.join(SERIES)}"),
        ({"body": WHOLE.replace("64.0", "1.0")}, "the metrics count fewer tokens than the engines made"),
    ],
)
def test_an_answer(about, reason):
    found = asked(**about).judge(HTTP_METRICS)
    assert (found.status, found.reason) == ("fail" if reason else "pass", reason)


def test_without_an_answer_nothing_is_known():
    assert Scene().judge(HTTP_METRICS).status == "untestable"
