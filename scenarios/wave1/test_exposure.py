"""What the data plane's address is for, and what not."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.capability import Capability
from harness.checks.exposure import CONTROL_PLANE_CLOSED
from harness.scenario import scenario
from harness.stack import Stack


@scenario(
    task=0,
    promise="no route of the control plane is open at the data plane's address",
    needs={Capability.ROUTER},
    checks=[CONTROL_PLANE_CLOSED],
)
async def test_the_control_plane_is_closed_at_the_data_planes_address(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904: "Router (InferenceRouter): Data plane only"; its review names unauthenticated control endpoints."""
    await stack.generate(prompts.unique(2), max_tokens=4, temperature=0.0)
    await stack.probe_router()
