"""Adapters for tests of the host: a small correct one over the made-up model of `tests/traces.py`, and faulty ones.

They run in a host under the driver's own interpreter. A faulty one misbehaves only at the prompt `TRIGGER`, so that it passes the
clean room.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from harness.contract import messages
from harness.contract.errors import StartFailed
from harness.contract.vocabulary import TINY
from harness.records.reference import ExpectedDigests, Text, Tokens
from tests import traces

TRIGGER = [500]
ANSWERS = 5
"""Answers that `GoesOn` makes for one call."""
SHARED_MEMORY = "parity-test-{pid}"
"""Name below /dev/shm of the shared memory that `Daemonizes` leaves behind."""
DIGESTS = {"weight": "0" * 16 + ":(2, 2):float32"}


class Toy:
    """Correct, greedy only, one server. `processes` are those that it reports as necessary."""

    processes: dict[str, int] = {}  # noqa: RUF012 - replaced, never changed
    code = "tests"

    def __init__(self):
        self.reference = traces.FakeReference(vocab_size=512)
        self.seen = []
        self.number = 0
        self.live = 0

    async def start(self, request):
        self.request = request
        return self.description()

    async def describe(self, _request):
        return self.description()

    def description(self):
        return messages.Description(
            target=self.request.target,
            topology=self.request.topology,
            start=self.request.start,
            capabilities=[],
            servers=[messages.ServerDescription(name="server-0")],
            processes=self.processes,
        )

    async def teardown(self, _request):
        return messages.Empty()

    async def generate(self, request):
        if TRIGGER in request.prompt_token_ids:
            self.live += 1
            await self.misbehave()
            self.live -= 1
        made = [self.run(prompt, request.sampling_params) for prompt in request.prompt_token_ids]
        return messages.Generation(
            response_ids=made, responses=[traces.decode(m) for m in made], stop_reasons=["length"] * len(made)
        )

    def run(self, prompt, params):
        tokens = self.reference.greedy(prompt, params["max_tokens"])
        self.number += 1
        seen = traces.executed(
            prompt, tokens, request_id=f"request-{self.number}", params=params, from_ns=time.time_ns()
        )
        self.seen += [msgspec.to_builtins(one) for one in seen]
        return tokens

    async def misbehave(self):
        """The misbehaviour of a faulty adapter."""

    async def digests(self, _request):
        return messages.DigestsResult(servers={"server-0": [DIGESTS]})

    async def observe(self, _request):
        seen, self.seen = self.seen, []
        return messages.ObserveResult(observations=seen)

    async def in_flight(self, _request):
        return messages.InFlightResult(requests=self.live, tokens=0, servers={})


class Tells(Toy):
    """Reports how it was asked to compute. Its start takes a while, and its log says so."""

    async def start(self, request):
        print("step 3 of 4", flush=True)  # noqa: T201 - into its log
        await asyncio.sleep(0.5)
        return await super().start(request)

    def description(self):
        asked = self.request
        note = f"{asked.dtype}, cuda_graphs={asked.cuda_graphs}, batch_invariant={asked.batch_invariant}"
        return msgspec.structs.replace(super().description(), notes=[note])


class Oracle(Toy):
    """The reference of the made-up model."""

    async def score(self, request):
        return self.reference.score(request)

    async def next(self, request):
        return self.reference.next(request)

    async def noise(self, request):
        return self.reference.noise(request)

    async def expected_digests(self, _request):
        return ExpectedDigests(digests=DIGESTS)

    async def vocabulary(self, _request):
        return TINY

    async def render(self, request):
        prompted = request.add_generation_prompt
        found = self.reference.render(request.messages, tools=request.tools, add_generation_prompt=prompted)
        return Tokens(tokens=found)

    async def decode(self, request):
        return Text(text=self.reference.decode(request.tokens, skip_special_tokens=request.skip_special_tokens))

    async def encode(self, request):
        return Tokens(tokens=self.reference.encode(request.text, add_special_tokens=request.add_special_tokens))


class Refused(Exception):
    status_code = 418


class Raises(Toy):
    async def misbehave(self):
        raise Refused("not like this")


class Hangs(Toy):
    async def misbehave(self):
        await asyncio.Event().wait()


class Blocks(Toy):
    """Blocks the host's event loop."""

    async def misbehave(self):
        time.sleep(3600)


class Exits(Toy):
    async def misbehave(self):
        print("the last words of the host", flush=True)  # noqa: T201 - into its log
        os._exit(3)


class Killed(Toy):
    async def misbehave(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Lies(Toy):
    """Answers with a result of another call."""

    async def generate(self, request):
        if TRIGGER in request.prompt_token_ids:
            return messages.HealthResult(healthy=True)
        return await super().generate(request)


class Daemonizes(Hangs):
    """Has a grandchild in its own session, which ignores SIGTERM and holds shared memory."""

    async def start(self, request):
        daemonize(Path(request.logs) / "grandchild.pid")
        return await super().start(request)


class LosesEngine(Toy):
    """Needs a process that dies in the middle of a call; the call keeps waiting for it."""

    grace_s = 0.5

    async def start(self, request):
        sys.modules["__main__"].GRACE_S = self.grace_s  # the host is the main module
        self.engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.processes = {"engine": self.engine.pid}
        return await super().start(request)

    async def misbehave(self):
        self.engine.kill()
        await asyncio.Event().wait()


class LosesEngineAndSays(LosesEngine):
    """As `LosesEngine`, but the call ends with the stack's own error."""

    async def misbehave(self):
        self.engine.kill()
        raise Refused("the engine is gone")


class LosesEngineUnnoticed(LosesEngine):
    """As `LosesEngine`, but the call succeeds."""

    async def misbehave(self):
        self.engine.kill()


class LosesServers(LosesEngine):
    """As `LosesEngine`, but the process belongs to a server and kill_server() ends it."""

    async def start(self, request):
        await super().start(request)
        self.processes = {"server-0/worker-0": self.engine.pid}
        return self.description()

    async def kill_server(self, _request):
        self.engine.kill()
        return messages.Empty()


class NeverClean(Toy):
    async def digests(self, _request):
        raise Refused("nobody reads this worker")


class NeverStarts(Toy):
    async def start(self, _request):
        raise StartFailed("server-1 is not up after 180 s")


class BreaksAtStart(Toy):
    async def start(self, _request):
        raise Refused("no such option")


class LeavesRows(Toy):
    """Refuses a batch, and runs its good rows with a later batch."""

    left = ()

    async def generate(self, request):
        if TRIGGER in request.prompt_token_ids:
            self.left = [row for row in request.prompt_token_ids if row != TRIGGER]
            raise Refused("not this row")
        if len(request.prompt_token_ids) > 1:
            for row in self.left:
                self.run(row, request.sampling_params)
        return await super().generate(request)


class GoesOn(Toy):
    """Whether its caller waits or not: several answers of one prompt, one after the other, with a moment between two of them."""

    async def generate(self, request):
        if request.prompt_token_ids == [TRIGGER]:
            await asyncio.shield(asyncio.create_task(self._answers()))
        return await super().generate(request)

    async def _answers(self):
        for _ in range(ANSWERS):
            self.live += 1
            await asyncio.sleep(0.05)
            self.run(TRIGGER, {"max_tokens": 1})
            self.live -= 1
            await asyncio.sleep(0.05)


class Swaps(Toy):
    """Healthy but wrong: returns results in reverse order of the prompts."""

    async def generate(self, request):
        made = await super().generate(request)
        return msgspec.structs.replace(
            made, response_ids=made.response_ids[::-1], responses=(made.responses or [])[::-1]
        )


def daemonize(pid_file: Path) -> None:
    """Start a process in its own session that ignores SIGTERM and has an entry in /dev/shm. Returns once it is ready."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            shared = os.open(f"/dev/shm/{SHARED_MEMORY.format(pid=os.getpid())}", os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(shared, 4096)
            held = mmap.mmap(shared, 4096)
            half = pid_file.with_suffix(".half")
            half.write_text(str(os.getpid()))
            half.rename(pid_file)
            while True:
                time.sleep(3600)
                held.flush()
        os._exit(0)
    while not pid_file.exists():
        time.sleep(0.02)
