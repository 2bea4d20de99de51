"""What a caller without credentials can reach, and what not."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.exposure import (
    BOUND_TO_LOOPBACK,
    CLOSED_TO_PAGES,
    CONTROL_PLANE_CLOSED,
    NOTHING_UNPICKLED,
    PORT_HELD_ALONE,
)
from harness.driving.stack import Stack
from harness.suite.scenario import scenario


@scenario(
    task=0,
    promise="a caller without credentials gets no further than the data plane",
    checks=[NOTHING_UNPICKLED, CONTROL_PLANE_CLOSED, CLOSED_TO_PAGES, BOUND_TO_LOOPBACK, PORT_HELD_ALONE],
)
async def test_a_caller_without_credentials_gets_no_further_than_the_data_plane(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904: "Router (InferenceRouter): Data plane only"; its review names unauthenticated control endpoints.

    The probe asks every address for every control route, whether a page of another origin may call it, and sends it a pickle that
    leaves a marker. It tries to bind each port a second time. The stack must work afterwards."""
    await stack.generate(prompts.unique(2), max_tokens=4, temperature=0.0)
    await stack.probe_security()
    await stack.generate(prompts.unique(2), max_tokens=4, temperature=0.0)
