"""Sequences of calls in every order that the contract allows. `python -m scenarios.sequences` draws them by the rules of
`harness.contract.states`, chooses those that visit most, and writes them to `scenarios/sequences.toml`.

They are kept in a file, so that a scenario of one name does the same in every run, under every release of Hypothesis.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from fixtures.prompts import Prompts
from harness.contract.capability import Capability
from harness.contract.states import FIRST, GIVEN_UP, NO_REQUEST, STEPS, State, Step, after, allowed, closing, needs
from harness.driving.stack import Stack
from scenarios.requests import ANSWER, SPREAD, long

KEPT = "sequences.toml"
LENGTH = 20
"""Steps of a sequence, before those that bring the stack back."""
DRAWN = 500
"""Sequences among which the kept ones are chosen."""
COMMON = frozenset(
    {"pause_keep", "sleep", "wake_up_tags", "weight_sync", "reset_prefix_cache", "health", "sample", "completion"}
    | {"chat_completion"}
)
"""Capabilities of sequences that need no others, so that stacks which offer little are asked too."""
DEATH = COMMON | {"kill_server"}
ABORT = frozenset({"pause_abort", "weight_sync", "reset_prefix_cache", "health", "completion", "chat_completion"})
"""Capabilities of sequences for stacks that pause by aborting alone (SkyRL 0.1.0)."""
HOLD_S = 0.25
"""Seconds that a pause with requests lasts at least: long enough to catch an engine that runs on."""

GIVEN_UP_VERSION = 3
"""The policy version of syncs that are given up. The others send 1 and 2."""

Sequence = tuple[Step, ...]
Cell = tuple[str, str, str]
"""(method, state, what requests do)."""


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kept sequence; each step as text."""

    name: str
    steps: list[str]

    @property
    def sequence(self) -> Sequence:
        return tuple(Step(*text.split(" ", 1)) for text in self.steps)


def kept() -> list[Kept]:
    """The sequences that are driven."""
    read = tomllib.loads((files("scenarios") / KEPT).read_text(encoding="utf-8"))
    return msgspec.convert(read["sequences"], list[Kept])


def capabilities(sequence: Iterable[Step]) -> set[Capability]:
    """What a stack must offer to be driven through it."""
    return {need for step in sequence for need in needs(step)} | {Capability.WEIGHT_SYNC}


def sleeps(sequence: Iterable[Step]) -> bool:
    """True if engines sleep in it: only colocated ones do."""
    return any(step.do in ("sleep", "wake_up") for step in sequence)


def spoils(sequence: Iterable[Step]) -> bool:
    """True if a sync is given up in it, or a server dies: the next scenario gets a fresh start."""
    return dies(sequence) or any(step.how == GIVEN_UP for step in sequence)


def dies(sequence: Iterable[Step]) -> bool:
    """True if a server dies in it."""
    return any(step.do == "kill_server" for step in sequence)


def cells(sequence: Iterable[Step]) -> set[Cell]:
    """The cells of the table that it visits."""
    found, state = set(), FIRST
    for step in sequence:
        found.add((str(step), str(state), state.requests))
        state = after(state, step)
    return found


def legal(steps: Iterable[Step]) -> Sequence:
    """The steps without those that the contract does not allow where they stand."""
    found, state = list[Step](), FIRST
    for step in steps:
        if allowed(state, step):
            found.append(step)
            state = after(state, step)
    return tuple(found)


def drawn(fits: Callable[[Step], bool]) -> list[Sequence]:
    """Legal sequences of steps that fit, the same in every run."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

    found: list[Sequence] = []

    class Contract(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.steps = State(), list[Step]()

        @rule(data=st.data())
        def step(self, data: st.DataObject) -> None:
            options = [one for one in STEPS if fits(one) and allowed(self.state, one)]
            new = [one for one in options if (str(one), str(self.state), self.state.requests) not in cells(self.steps)]
            step = data.draw(st.sampled_from(new or options))
            self.steps.append(step)
            self.state = after(self.state, step)

        def teardown(self) -> None:
            found.append(tuple(self.steps))

    quiet = settings(
        derandomize=True,
        database=None,
        max_examples=DRAWN,
        stateful_step_count=LENGTH,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    run_state_machine_as_test(Contract, settings=quiet)
    return found


def chosen(sequences: list[Sequence], count: int, visited: set[Cell]) -> list[Sequence]:
    """The sequences that visit most cells which are not `visited` yet, one after the other. They are added there."""
    best = []
    for _ in range(count):
        one = max(sequences, key=lambda sequence: len(cells(sequence) - visited))
        best.append(one)
        visited |= cells(one)
    return best


def kind_of(sequence: Sequence) -> str:
    """What names its group: "asleep" if engines sleep in it, "death" if a server dies that has requests, "torn" if a sync is given
    up, "" if nothing of it happens. "idle death", of a server without requests, is in no group."""
    if any(step == "kill_server" and requests == NO_REQUEST for step, _, requests in cells(sequence)):
        return "idle death"
    return "asleep" if sleeps(sequence) else "death" if dies(sequence) else "torn" if spoils(sequence) else ""


def write() -> None:
    """Draw and choose sequences, beside those that are kept already: the ledger and recordings name these."""
    groups: list[tuple[str, int, Callable[[Step], bool]]] = [
        ("common", 6, lambda step: needs(step) <= COMMON and not sleeps([step]) and not spoils([step])),
        ("all", 7, lambda step: not sleeps([step]) and not spoils([step])),
        ("common_asleep", 8, lambda step: needs(step) <= COMMON and not spoils([step])),
        ("all_asleep", 9, lambda step: not spoils([step])),
        ("common_torn", 2, lambda step: needs(step) <= COMMON and not sleeps([step])),
        ("all_torn", 1, lambda step: not sleeps([step]) and not dies([step])),
        ("common_death", 3, lambda step: needs(step) <= DEATH and not sleeps([step]) and step.how != GIVEN_UP),
        ("abort", 4, lambda step: needs(step) <= ABORT and not sleeps([step]) and not spoils([step])),
        ("all_death", 1, lambda step: not sleeps([step]) and step.how != GIVEN_UP),
    ]
    lines = ["# Written by `python -m scenarios.sequences`. Do not edit."]
    found = {one.name: one.sequence for one in kept()}
    visited = {cell for sequence in found.values() for cell in cells(sequence)}
    for group, count, fits in groups:
        names = [f"{group}_{number}" for number in range(1, count + 1)]
        if new := [name for name in names if name not in found]:
            sequences = [one for one in drawn(fits) if kind_of(one) == group.partition("_")[2]]
            found |= zip(new, chosen(sequences, len(new), visited), strict=True)
        for name in names:
            steps = "".join(f'  "{step}",\n' for step in found[name])
            lines.append(f'\n[[sequences]]\nname = "{name}"\nsteps = [\n{steps}]')
    Path(str(files("scenarios") / KEPT)).write_text("\n".join(lines) + "\n", encoding="utf-8")


# --- driving --------------------------------------------------------------------------------------------------------


async def drive(stack: Stack, prompts: Prompts, sequence: Iterable[Step]) -> None:
    """The steps in their order, then those that bring the stack back, and answers of every server. After a death, answers of the
    living server, unless its weights are torn."""
    driver, state = _Driver(stack, prompts), FIRST
    async with asyncio.TaskGroup() as tasks:
        for step in sequence:
            await driver.do(step, state, tasks)
            state = after(state, step)
        for step in closing(state):
            await driver.do(step, state, tasks)
            state = after(state, step)
    if not state.dead:
        await stack.digests()
        await stack.generate(prompts.unique(SPREAD), **ANSWER)
    elif not state.torn:
        await stack.attempt(stack.generate(prompts.unique(SPREAD), **ANSWER))


class _Driver:
    """Takes single steps. A call that fails does not end the sequence: `harness.checks.sequences` judges it."""

    def __init__(self, stack: Stack, prompts: Prompts) -> None:
        self.stack, self.prompts = stack, prompts
        self.background: list[asyncio.Task[None]] = []
        self.syncs = 0

    async def do(self, step: Step, state: State, tasks: asyncio.TaskGroup) -> None:
        match step:
            case Step(do="send"):
                sent = tasks.create_task(self._ask(step.how, long(self.stack)))
                self.background.append(sent)
                if state.paused:
                    await asyncio.sleep(0)  # the call is recorded before the next step's
                else:
                    await self.stack.until(
                        lambda seen: (seen.requests > 0 and seen.tokens > 0) or (state.dead and sent.done()),
                        "tokens of what was sent",
                    )
            case Step(do="cancel"):
                self.background.pop(0).cancel()
                await asyncio.sleep(0)
            case Step(do="finish"):
                await asyncio.gather(*self.background)
                self.background.clear()
            case Step(do="generate" | "sample" | "chat_completion" | "completion"):
                await self._ask(step.do, ANSWER)
            case _:
                if step.do == "resume" and state.paused and state.pending:
                    await asyncio.sleep(HOLD_S)
                await self._control(step)

    async def _control(self, step: Step) -> None:
        stack = self.stack
        match step.do:
            case "pause":
                await stack.attempt(stack.pause(step.how))  # type: ignore[arg-type]
            case "sleep":
                await stack.attempt(stack.sleep(int(step.how)))
            case "wake_up":
                await stack.attempt(stack.wake_up([step.how] if step.how else None))
            case "sync_weights" if step.how == GIVEN_UP:
                await stack.attempt(stack.sync_weights(GIVEN_UP_VERSION, chunks=3, fail_after_chunks=1))
                await stack.attempt(stack.prepare_weight_sync())
            case "sync_weights":
                self.syncs += 1
                await stack.attempt(stack.sync_weights(1 + self.syncs % 2, chunks=int(step.how)))
            case "reset_prefix_cache":
                await stack.attempt(stack.reset_prefix_cache(reset_running_requests=bool(step.how)))
            case "kill_server":
                await stack.kill_server(stack.servers[0])
            case "tokenize":
                await stack.attempt(stack.tokenize(self.prompts.texts(2)))
            case _:
                await stack.attempt(getattr(stack, step.do)())

    async def _ask(self, method: str, params: dict[str, Any]) -> None:
        stack, prompts = self.stack, self.prompts
        body = {"model": stack.model_name, **params}
        match method:
            case "generate":
                await stack.attempt(stack.generate(prompts.unique(2), **params))
            case "sample":
                await stack.attempt(stack.sample(prompts.one(), 1, temperature=0.0, max_tokens=params["max_tokens"]))
            case "chat_completion":
                await stack.attempt(stack.chat_completion({**body, "messages": prompts.conversations(1)[0]}))
            case "completion":
                await stack.attempt(stack.completion({**body, "prompt": prompts.one()}))


if __name__ == "__main__":
    write()
