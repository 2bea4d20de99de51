"""Control calls, syncs and requests in orders that nobody thought of: every call that the contract allows works in every state."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.control_plane import FAN_OUT
from harness.checks.history import EXPLAINED, explained
from harness.checks.sequences import AS_THE_STATE_SAYS
from harness.checks.weights import EVERY_PARAMETER
from harness.driving.stack import Stack
from harness.suite.scenario import variants
from scenarios.sequences import Kept, capabilities, dies, drive, kept, legal, sleeps, spoils


def declared(one: Kept) -> dict[str, Any]:
    """The scenario that a kept sequence is. Nobody can read a dead server's parameters."""
    death: dict[str, Any] = {
        "promise": "beside a dead server, calls work at the living one; what the dead one fails says so",
        "checks": [AS_THE_STATE_SAYS, FAN_OUT, explained()],
        "deadline_s": 180.0,
    }
    return {
        "one": one,
        "needs": capabilities(one.sequence),
        "topologies": ("colocated" if sleeps(one.sequence) else "disaggregated",),
        "spoils": spoils(one.sequence),
        **(death if dies(one.sequence) else {}),
    }


@variants(
    {f"test_{one.name}": declared(one) for one in kept()},
    task=5,
    promise="calls that the contract allows work in this order too, and engines end on the newest weights",
    checks=[AS_THE_STATE_SAYS, FAN_OUT, EVERY_PARAMETER, EXPLAINED],
    deadline_s=60.0,
    bulk=True,
)
async def in_this_order(stack: Stack, prompts: Prompts, *, one: Kept) -> None:
    """The rules of harness/contract/states.py, each with its source; SkyRL API reference, InferenceEngineInterface; SkyRL #899."""
    await drive(stack, prompts, legal(stack.within_budget(one.sequence, first=True)))
