"""The states that the control calls of the contract lead to: what may be called in which state, and what follows.

Sequences of calls are made by these rules (`scenarios/sequences.py`), and recordings are read by them (`harness.checks.sequences`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import msgspec

from harness.contract.capability import Capability
from harness.contract.messages import PauseMode

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
"""What sleeps (vLLM sleep mode)."""

Pending = Literal["in flight", "frozen", "cut short", "queued"]
"""What a request does whose caller waits: pause(keep) froze it, pause(abort) met it, or it came during a pause."""
NO_REQUEST = "no request"
MOST_PENDING = 3
"""Most calls in the background of a sequence."""

GIVEN_UP = "given up"
"""In place of the number of chunks: the trainer fails in the middle of the sync, and joins again for the next one."""

REQUESTS = ("generate", "sample", "chat_completion", "completion")
QUESTIONS = ("is_paused", "health", "world_size", "tokenize")
"""Calls that change nothing and need no weights."""
TO_ALL = ("pause", "resume", "sleep", "wake_up", "sync_weights", "reset_prefix_cache", "is_paused", "world_size")
"""Calls that ask every server (SkyRL #904, "Control plane (fan-out)"). With one server dead they succeed at the living server, or
fail by an error that says that a server is gone; either way the living server obeys."""


class Step(msgspec.Struct, frozen=True, order=True):
    """One step of a sequence: a call of the contract, `how` its argument. Requests are answered at once unless `send` says that
    they stay in the background; "cancel" gives up the oldest of these, "finish" waits for them all."""

    do: str
    how: str = ""

    def __str__(self) -> str:
        return f"{self.do} {self.how}".strip()

    @property
    def method(self) -> str:
        return self.how if self.do == "send" else self.do


STEPS: tuple[Step, ...] = (
    *(Step("pause", mode) for mode in ("keep", "abort", "wait")),
    Step("resume"),
    *(Step("sleep", level) for level in ("1", "2")),
    *(Step("wake_up", tag) for tag in ("", *TAGS)),
    *(Step("sync_weights", chunks) for chunks in ("1", "3", GIVEN_UP)),
    *(Step("reset_prefix_cache", how) for how in ("", "running")),
    *map(Step, REQUESTS),
    *(Step("send", method) for method in REQUESTS),
    *map(Step, ("cancel", "finish")),
    *map(Step, QUESTIONS),
    Step("kill_server"),
)


NEEDS: dict[str, set[Capability]] = {
    "resume": set(),
    "sleep": {Capability.SLEEP},
    "wake_up": {Capability.SLEEP},
    "wake_up weights": {Capability.SLEEP, Capability.WAKE_UP_TAGS},
    "wake_up kv_cache": {Capability.SLEEP, Capability.WAKE_UP_TAGS},
    "sync_weights": {Capability.WEIGHT_SYNC},
    "reset_prefix_cache running": {Capability.RESET_PREFIX_CACHE, Capability.RESET_RUNNING_REQUESTS},
    **{step: set() for step in ("generate", "cancel", "finish")},
}
"""Step or method → what a stack must offer for it. All others are a capability of their own name."""


def needs(step: Step) -> set[Capability]:
    """What a stack must offer for this step."""
    if step.do == "pause":
        return {Capability(f"pause_{step.how}")}
    found = NEEDS.get(str(step), NEEDS.get(step.method))
    return {Capability(step.method)} if found is None else found


class State(msgspec.Struct, frozen=True):
    """What the calls so far have made of a stack. It begins running, awake and without requests."""

    paused: PauseMode | None = None
    asleep: tuple[Tag, ...] = ()
    level: int = 0
    """Of the last sleep."""
    lost: bool = False
    """True from sleep(level=2) to the next sync: the weights are gone."""
    torn: bool = False
    """True from a sync that the trainer gave up to the next sync: a part of the weights may be new. With a server dead, true from
    any sync on: nobody knows whether it was made at the living server."""
    dead: bool = False
    """True after the death of one server. The contract has no call that brings it back."""
    pending: tuple[Pending, ...] = ()
    """One for each call in the background."""

    def __str__(self) -> str:
        parts = [f"paused ({self.paused})"] if self.paused else []
        if len(self.asleep) == len(TAGS):
            parts.append(f"asleep (level {self.level})")
        elif self.asleep:
            parts.append("only weights awake" if self.asleep == ("kv_cache",) else "only cache awake")
        elif self.lost:
            parts.append("weights lost")
        if self.torn:
            parts.append("weights torn")
        if self.dead:
            parts.append("one server dead")
        return ", ".join(parts) or "running"

    @property
    def requests(self) -> str:
        """What its requests do: "frozen and queued"."""
        return " and ".join(sorted(set(self.pending))) or NO_REQUEST


FIRST = State()


_ASKS = ("send", *REQUESTS)
_RULES: tuple[tuple[tuple[str, ...], Callable[[State, Step], object], str], ...] = (
    (("pause",), lambda at, _: at.asleep, "no source says what pause() does to engines that sleep"),
    (
        ("pause",),
        lambda at, step: step.how == "wait" and {"frozen", "queued"} & set(at.pending),
        "pause(wait) would wait for requests that an earlier pause holds",
    ),
    (("resume",), lambda at, _: at.asleep and at.pending, "requests would run on engines that sleep"),
    (("sleep",), lambda at, _: at.asleep, "the engines sleep"),
    (
        ("sleep",),
        lambda at, _: at.pending,
        "generation ends before sleep() (SkyRL 0.2.0, AsyncVLLMInferenceEngine.sleep)",
    ),
    (("sync_weights",), lambda at, _: "weights" in at.asleep, "weights that sleep cannot be written"),
    (
        ("sync_weights",),
        lambda at, _: {"in flight", "cut short"} & set(at.pending),
        "weights change under requests only while these are frozen (SkyRL #1014, task 13)",
    ),
    (("sleep", "resume"), lambda at, _: at.torn, "a sync that failed is made again before anything uses the weights"),
    (("pause",), lambda at, _: at.torn and at.pending, "frozen requests wait for the sync that is made again"),
    (("reset_prefix_cache",), lambda at, _: "kv_cache" in at.asleep, "a cache that sleeps holds nothing"),
    (
        _ASKS,
        lambda at, _: at.asleep,
        "requests to engines that sleep are a scenario of test_sleep.py, which no sequence repeats",
    ),
    (_ASKS, lambda at, _: at.lost, "engines without weights cannot answer"),
    (_ASKS, lambda at, _: at.torn, "nobody knows what engines answer after a sync that failed"),
    (("cancel",), lambda at, _: not at.pending, "nothing is in the background"),
    (("kill_server",), lambda at, _: at.dead, "one server has to live"),
    (
        ("kill_server",),
        lambda at, _: at.asleep or at.lost or at.torn,
        "no source says what a death means to engines that sleep, or whose weights are lost or torn",
    ),
    (
        ("sleep", "wake_up"),
        lambda at, _: at.dead,
        "only colocated engines sleep, and sequences with a death are disaggregated",
    ),
    (
        ("sync_weights",),
        lambda at, _: at.dead and at.pending,
        "a sync that a death fails is never made again: requests would wait",
    ),
    (("sync_weights",), lambda at, step: at.dead and step.how == GIVEN_UP, "a sync with a dead server may fail before"),
    (
        ("sync_weights",),
        lambda at, _: at.dead and at.torn,
        "the trainer has left the group of workers, and cannot join it again beside a dead one",
    ),
)
"""(steps, when the contract does not allow them, why)."""


def forbidden(state: State, step: Step) -> str | None:
    """Why the contract forbids this step here, or says nothing about it. None: it allows it."""
    return next((why for steps, where, why in _RULES if step.do in steps and where(state, step)), None)


def endless(state: State, step: Step) -> bool:
    """True if a single caller would wait there indefinitely: only resume() lets the answer through."""
    waits = step.do in REQUESTS or step.do == "finish"
    return waits and state.paused is not None


def after(state: State, step: Step) -> State:
    """The state that an allowed step leads to."""
    change: dict[str, Any] = {}
    match step.do:
        case "pause":
            met = {"keep": {"in flight": "frozen"}, "abort": {"in flight": "cut short", "frozen": "cut short"}}
            left = [one for one in state.pending if step.how != "wait" or one != "in flight"]
            change = {"paused": step.how, "pending": tuple(met.get(step.how, {}).get(one, one) for one in left)}
        case "resume":
            change = {"paused": None, "pending": ("in flight",) * len(state.pending)}
        case "sleep":
            change = {"asleep": TAGS, "level": int(step.how), "lost": state.lost or step.how == "2"}
        case "wake_up":
            change = {"asleep": tuple(tag for tag in state.asleep if step.how and tag != step.how)}
        case "sync_weights":
            torn = step.how == GIVEN_UP or state.dead
            change = {"lost": state.lost and torn, "torn": torn}
        case "send":
            change = {"pending": (*state.pending, "queued" if state.paused else "in flight")}
        case "cancel":
            change = {"pending": state.pending[1:]}
        case "finish":
            change = {"pending": ()}
        case "kill_server":
            change = {"dead": True}
    return msgspec.structs.replace(state, **change)


def allowed(state: State, step: Step) -> bool:
    """True if a sequence may go on with this step."""
    useless = (step.do == "finish" and not state.pending) or (step.do == "wake_up" and step.how and not state.asleep)
    full = step.do == "send" and len(state.pending) == MOST_PENDING
    return not (useless or full or forbidden(state, step) or endless(state, step))


def closing(state: State) -> list[Step]:
    """Steps that bring a stack back: awake, resumed, its requests answered, with weights. After a death, those that end requests:
    the stack gets a fresh start."""
    if state.dead and state.torn:
        return []
    steps = [Step("sync_weights", "1")] if state.torn else []
    if state.asleep:
        steps.append(Step("wake_up"))
    if state.paused:
        steps.append(Step("resume"))
    if state.pending:
        steps.append(Step("finish"))
    return steps if state.dead else [*steps, Step("sync_weights", "1")]


@lru_cache
def reachable() -> tuple[State, ...]:
    """Every state that allowed steps lead to."""
    found, new = {FIRST}, [FIRST]
    while new:
        state = new.pop()
        for step in STEPS:
            following = after(state, step) if allowed(state, step) else state
            if following not in found:
                found.add(following)
                new.append(following)
    return tuple(sorted(found, key=lambda one: (str(one) != "running", str(one), one.pending)))
