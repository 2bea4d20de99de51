"""A run of SkyRL's trainer leaves no task behind. Runs in a stack's environment, whose Python tells a task's context."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real

END = """
import asyncio, json, sys
from backends.skyrl.runs import Run
ended = []

async def rollout():
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # as a rollout that tells its server of the end of its session
        ended.append("rollout")

of_an_engine = {"__name__": "vllm.v1.engine", "asyncio": asyncio}
exec("async def handles_outputs():\\n    await asyncio.Event().wait()", of_an_engine)

class Trainer:
    async def train(self):
        self.handler = asyncio.create_task(of_an_engine["handles_outputs"]())
        begun = asyncio.create_task(rollout())
        await asyncio.sleep(0)
        raise ValueError(f"a sync failed while {len([begun])} rollout was under way")

class Client:
    async def teardown(self):
        ended.append("client")

async def main():
    trainers = Run(threaded=sys.argv[1] == "threaded")
    trainers._made = lambda *_: Trainer()
    other = asyncio.create_task(asyncio.Event().wait())
    await trainers.start(None, Client(), None, None, None)
    wants = await trainers.wants(60)
    await trainers.end()
    return [wants.ended, ended, not other.done() and len(asyncio.all_tasks())]

print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.parametrize(("way", "closed", "tasks"), [("threaded", ["client"], 2), ("in the host's loop", [], 3)])
def test_what_a_failed_run_left_under_way_is_cancelled_and_nothing_else(run, way, closed, tasks):
    """An engine within the process keeps the task that handles its outputs, which the run's first request began."""
    assert run(END, way) == ["ValueError: a sync failed while 1 rollout was under way", ["rollout", *closed], tasks]
