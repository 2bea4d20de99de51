"""The cap of a client: green up to it, red above it, untestable if it was never reached."""

from __future__ import annotations

import pytest

from harness.checks.request_cap import CAP, NEVER_FULL, TOO_MANY
from harness.contract.messages import REQUEST_CAP
from tests.checks.scene import Scene


class Crowd(Scene):
    """`many` requests to two servers. All begin before any ends, but for the last `late`, which begin after that."""

    def __init__(self, many: int, *, late: int = 0) -> None:
        super().__init__()
        self.generate([[row, 70, row % 7] for row in range(many - late)], length=1)
        if late:
            self.generate([[row, 71, row % 7] for row in range(late)], length=1)


@pytest.mark.parametrize(
    ("many", "late", "status", "reason"),
    [
        (2 * REQUEST_CAP, 0, "pass", ""),
        (2 * REQUEST_CAP + 9, 9, "pass", ""),
        (2 * REQUEST_CAP + 1, 0, "fail", TOO_MANY),
        (2 * REQUEST_CAP - 1, 0, "untestable", NEVER_FULL),
    ],
    ids=["full", "the others wait", "one too many", "never full"],
)
def test_the_cap(many, late, status, reason):
    found = Crowd(many, late=late).judge(CAP)
    assert (found.status, found.reason) == (status, reason)
