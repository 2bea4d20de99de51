"""More requests than fit: engines are full while others wait, and not fuller."""

from __future__ import annotations

import pytest

from harness.checks.waiting import WHO_WAITS
from harness.contract.messages import ENGINE_PLACES
from tests.checks.scene import SERVERS, Scene

COUNT = 2 * ENGINE_PLACES * len(SERVERS)


def scene(at_once: int) -> Scene:
    """So many requests at a time, until all are served."""
    made = Scene()
    prompts = [[10 + n // 40, 11 + n % 40, 12] for n in range(COUNT)]
    for begin in range(0, COUNT, at_once * len(SERVERS)):
        batch = prompts[begin : begin + at_once * len(SERVERS)]
        made.generate(batch, length=2)
        together: dict = {}
        for seen in [one for one in made.seen if one.kind == "step" and one.at_ns > made.calls[-1].started_ns]:
            together.setdefault((seen.server, seen.at_ns), []).append(seen)
        for same in together.values():
            same[0].data["tokens"].update({k: v for one in same[1:] for k, v in one.data["tokens"].items()})
            made.seen = [one for one in made.seen if not any(one is other for other in same[1:])]
    return made


@pytest.mark.parametrize(
    ("at_once", "reason"),
    [
        (ENGINE_PLACES, ""),
        (ENGINE_PLACES // 8, "generate() leaves an engine's places empty while its requests wait"),
        (ENGINE_PLACES + 8, "an engine runs more requests at once than it has places"),
    ],
)
def test_engines_are_full_while_requests_wait(at_once, reason):
    found = scene(at_once).judge(WHO_WAITS)
    assert (found.status, found.reason) == ("fail" if reason else "pass", reason)
    assert found.numbers["most_running_on_server-0"] == at_once


def test_nothing_is_told_of_a_few_requests():
    few = Scene()
    few.generate([[10, 11, 12]])
    assert few.judge(WHO_WAITS).status == "untestable"
