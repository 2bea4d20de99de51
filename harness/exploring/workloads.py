"""Workloads: sequences of operations on a stack that the contract allows, as values that can be drawn, shrunk and printed.

An operation is a small frozen struct that writes its calls into a `Script` (`harness/exploring/scripts.py`), with labels and checks
that fit. It leaves the stack as it must be for the next: resumed, awake, and with no cache of a policy that was replaced. How
they are drawn is said in `harness.exploring.strategies`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from fixtures.prompts import Prompts
from harness.contract.capability import Capability
from harness.contract.messages import PauseMode, SessionId
from harness.driving.stack import Stack
from harness.exploring.scripts import Body, Role, Script, load
from harness.suite.scenario import Scenario

Sampling = tuple[tuple[str, str], ...]
"""Sampling parameters: (name, code)."""

LONG = 64
"""Tokens of answers that are to be caught in the middle."""
MANY = 32
"""So many requests without a session leave one of two servers out with a chance of 2^-31."""
DRAWS = 384
"""So many first tokens tell a temperature that is off by a third (`harness.checks.sampling`)."""


class Operation(msgspec.Struct, frozen=True, tag=True):
    """Something that is done to a stack."""

    def write(self, script: Script) -> None:
        raise NotImplementedError


def arguments(sampling: Sampling) -> list[str]:
    """As they are given to generate() and sample()."""
    return [f"{name}={code}" for name, code in sampling]


def answer(most: int, *, logprobs: bool = False) -> Sampling:
    """A greedy answer of exactly `most` tokens."""
    return (
        ("max_tokens", str(most)),
        ("temperature", "0.0"),
        ("ignore_eos", "True"),
        *((("logprobs", "0"),) if logprobs else ()),
    )


SHORT = answer(8, logprobs=True)


# --- requests -------------------------------------------------------------------------------------------------------


class Rows(msgspec.Struct, frozen=True):
    """Prompts of a batch."""

    count: int
    kind: Literal["unique", "ragged", "long", "broken_off", "copies"] = "unique"

    @property
    def code(self) -> str:
        if self.kind == "copies":
            return f"[prompts.one()] * {self.count}"
        return f"prompts.{self.kind}({self.count})"


class Generate(Operation, frozen=True):
    """A batch. `sessions` are dealt out to its rows in turn; with None no row has one."""

    rows: Rows
    sampling: Sampling
    sessions: tuple[SessionId, ...] = ()

    def write(self, script: Script) -> None:
        script.call("generate", self.rows.code, *_sessions(self.sessions, self.rows.count), *arguments(self.sampling))


def _sessions(pool: tuple[SessionId, ...], count: int) -> list[str]:
    if not pool:
        return []
    return [f"session_ids=[{', '.join(_literal(pool[row % len(pool)]) for row in range(count))}]"]


def _literal(session: SessionId) -> str:
    return str(session) if isinstance(session, int) else f'"{session}"'


class Messages(Operation, frozen=True):
    """A batch of conversations, rendered by the stack."""

    count: int
    sampling: Sampling

    def write(self, script: Script) -> None:
        script.need(Capability.GENERATE_MESSAGES)
        script.call("generate_messages", f"prompts.conversations({self.count})", *arguments(self.sampling))


ADAPTERS = frozenset({Capability.LORA, Capability.ADAPTER_BY_NAME, Capability.SEVERAL_ADAPTERS})
"""What it takes to ask now under one name, now under another, now under none."""


class Under(msgspec.Struct, frozen=True):
    """Which adapter answers: None is the base model. `version` is loaded under that name first; 0: the one that is there."""

    adapter: str | None = None
    version: int = 0


Batch = Literal["short", "long", "ragged"]
BATCHES: dict[Batch, str] = {"short": "prompts.unique(3)", "long": "prompts.long(2)", "ragged": "prompts.ragged(4)"}


class Ask(Operation, frozen=True):
    """One of three batches that are asked again and again, always alike: what differs is due to what happened between.

    Once for each of `under`, under that adapter.
    """

    batch: Batch
    under: tuple[Under, ...] = (Under(),)

    def write(self, script: Script) -> None:
        batch = script.known(f"{self.batch}_batch", BATCHES[self.batch])
        for one in self.under:
            adapter = []
            if one.adapter is not None:
                if one.version or one.adapter not in script.adapters:
                    Load(one.adapter, one.version or 1).write(script)
                adapter = [f'lora_adapter="{one.adapter}"']
            script.call("generate", batch, *adapter, *arguments(SHORT))


class Repeated(Operation, frozen=True):
    """A seeded batch twice, the second time in company if so, and once under another seed."""

    count: int
    seed: int
    company: int = 0

    def write(self, script: Script) -> None:
        script.line(f"{(batch := script.fresh('batch'))} = prompts.unique({self.count})")
        once, again, other = (script.fresh(label) for label in ("once", "again", "other"))
        sampling = ["max_tokens=12", "temperature=1.0", "ignore_eos=True"]
        script.call("generate", batch, f"seed={self.seed}", *sampling, label=once)
        rows = f"[*prompts.ragged({self.company}), *{batch}]" if self.company else batch
        script.call("generate", rows, f"seed={self.seed}", *sampling, label=again)
        script.call("generate", batch, f"seed={self.seed + 1}", *sampling, label=other)
        script.check(f'same_output("{once}", "{again}")')
        script.check(f'different_output("{once}", "{other}")')


class Filtered(Operation, frozen=True):
    """A batch that samples under filters."""

    filters: Sampling
    seed: int

    def write(self, script: Script) -> None:
        label = script.fresh("filtered")
        sampling = ["max_tokens=4", f"seed={self.seed}", "ignore_eos=True"]
        script.call("generate", "prompts.unique(16)", *arguments(self.filters), *sampling, label=label)
        script.check(f'within_filters("{label}")')


class Draws(Operation, frozen=True):
    """The first token of one prompt, many times."""

    temperature: float = 1.0

    def write(self, script: Script) -> None:
        label = script.fresh("drawn")
        sampling = [f"temperature={self.temperature}", "max_tokens=1"]
        script.call("generate", f"[prompts.one()] * {DRAWS}", *sampling, label=label, role=Role.APART)
        script.check(f'goodness_of_fit("{label}")')


class Copies(Operation, frozen=True):
    """One prompt, several times, without a seed."""

    count: int

    def write(self, script: Script) -> None:
        label = script.fresh("copies")
        sampling = ["temperature=1.0", "max_tokens=12", "ignore_eos=True"]
        script.call("generate", f"[prompts.one()] * {self.count}", *sampling, label=label)
        script.check(f'independent("{label}")')


class Sample(Operation, frozen=True):
    """sample(), free, seeded or greedy."""

    count: int
    seed: int | None = None
    greedy: bool = False
    session: SessionId | None = None

    def write(self, script: Script) -> None:
        script.need(Capability.SAMPLE)
        session = [] if self.session is None else [f"session_id={_literal(self.session)}"]
        seed = [] if self.seed is None or self.greedy else [f"seed={self.seed}"]
        sampling = [f"temperature={0.0 if self.greedy else 1.0}", *seed, "max_tokens=12", "logprobs=0"]
        judged = not self.greedy and self.count > 1
        label = script.fresh("samples") if judged else None
        script.call("sample", "prompts.one()", str(self.count), *session, *sampling, label=label)
        if judged:
            script.check(f'independent("{label}")')


class Completion(Operation, frozen=True):
    """completion() of one prompt (count 0) or of a batch, in token ids or in text."""

    count: int
    text: bool = False
    sampling: Sampling = answer(8)
    session: SessionId | None = None

    def write(self, script: Script) -> None:
        script.need(Capability.COMPLETION)
        if self.count:
            prompt = f"prompts.{'texts' if self.text else 'ragged'}({self.count})"
        else:
            prompt = "prompts.texts(1)[0]" if self.text else "prompts.one()"
        script.call("completion", _body({"prompt": prompt}, self.sampling, self.session))


class Chat(Operation, frozen=True):
    """chat_completion() of several conversations at once."""

    count: int
    sampling: Sampling = answer(8)
    session: SessionId | None = None

    def write(self, script: Script) -> None:
        script.need(Capability.CHAT_COMPLETION)
        with script.block(f"for messages in prompts.conversations({self.count}):"):
            script.call("chat_completion", _body({"messages": "messages"}, self.sampling, self.session))


def _body(about: dict[str, str], sampling: Sampling, session: SessionId | None = None, model: str = "") -> str:
    fields = {"model": model or "stack.model_name", **about, **dict(sampling), "return_token_ids": "True"}
    if session is not None:
        fields["session_id"] = _literal(session)
    return "{" + ", ".join(f'"{name}": {code}' for name, code in fields.items()) + "}"


class Conversation(Operation, frozen=True):
    """Turns through token ids: each prompt is the one before, its response and some new ids."""

    turns: int
    broken: bool = False

    def write(self, script: Script) -> None:
        talk = script.fresh("talk")
        kind = "broken_off" if self.broken else "unique"
        script.line(f"{(context := script.fresh('context'))}: list[int] = []")
        with script.block(f"for new in prompts.{kind}({self.turns}):"):
            script.line(f"{context} += new")
            session = f'session_ids=["{talk}"]'
            script.call("generate", f"[{context}]", session, *arguments(answer(8)), into="said")
            script.line(f"{context} = {context} + said.response_ids[0]")


class Concurrent(Operation, frozen=True):
    """Callers that do not wait for each other."""

    callers: int
    rows: int

    def write(self, script: Script) -> None:
        with script.block("async with asyncio.TaskGroup() as callers:"):  # noqa: SIM117 - the text's blocks
            with script.block(f"for caller in range({self.callers}):"):
                sampling = ["max_tokens=4 + 2 * caller", "temperature=0.0", "ignore_eos=True"]
                script.call("generate", f"prompts.ragged({self.rows})", *sampling, task="callers")


class Crowd(Operation, frozen=True):
    """Many short requests: `alike` of one prompt, `sessions` of as many sessions (an integer and its text in turn)."""

    alike: bool = False
    sessions: bool = False
    batched: bool = False

    def write(self, script: Script) -> None:
        sampling = ["max_tokens=2", "temperature=0.0"]
        batch = f"[prompts.one()] * {MANY}" if self.alike else f"prompts.unique({MANY})"
        if self.sessions:
            with script.block(f"for number, prompt in enumerate({batch}):"):
                either = "number // 2 if number % 2 else str(number // 2)"
                script.call("generate", "[prompt]", f"session_ids=[{either}]", *sampling)
        elif self.batched:
            script.call("generate", batch, *sampling)
        else:
            with script.block(f"for prompt in {batch}:"):
                script.call("generate", "[prompt]", *sampling)


# --- tokenizer and questions ----------------------------------------------------------------------------------------

HARD_TEXT = ["  Two  Spaces\\n", "naïve café, 日本語, 🎉", "<|im_start|>user\\nsaid<|im_end|>", ""]


class Texts(Operation, frozen=True):
    """Texts to tokens and back."""

    count: int
    hard: bool = False

    def write(self, script: Script) -> None:
        script.need(Capability.TOKENIZE)
        hard = f", {', '.join(f'{chr(34)}{text}{chr(34)}' for text in HARD_TEXT)}" if self.hard else ""
        token_ids = script.fresh("token_ids")
        script.call("tokenize", f"[*prompts.texts({self.count}){hard}]", into=token_ids)
        script.call("detokenize", token_ids)


class ReadBack(Operation, frozen=True):
    """Tokens to text, special ones among them."""

    count: int

    def write(self, script: Script) -> None:
        script.need(Capability.TOKENIZE)
        script.call("detokenize", f"[*prompts.unique({self.count}), stack.vocabulary.some_special(3), []]")


Question = Literal["health", "world_size", "probe_security", "digests", "pickle_client"]
NEEDED: dict[Question, Capability | None] = {
    "health": Capability.HEALTH,
    "world_size": Capability.WORLD_SIZE,
    "probe_security": None,
    "digests": None,
    "pickle_client": Capability.PICKLE_CLIENT,
}


class Look(Operation, frozen=True):
    """Calls that change nothing, some times over."""

    methods: tuple[Question, ...]
    times: int = 1

    def write(self, script: Script) -> None:
        for method in self.methods * self.times:
            needed = NEEDED[method]
            script.need(*([] if needed is None else [needed]))
            script.call(method)


# --- control plane --------------------------------------------------------------------------------------------------

During = Literal["late", "late_long", "is_paused", "pause_again", "reset", "sync", "digests", "health"]
"""What may happen during a pause."""
NEEDED_DURING: dict[During, frozenset[Capability]] = {
    "late": frozenset(),
    "late_long": frozenset(),
    "is_paused": frozenset({Capability.IS_PAUSED}),
    "pause_again": frozenset(),
    "reset": frozenset({Capability.RESET_PREFIX_CACHE}),
    "sync": frozenset({Capability.WEIGHT_SYNC, Capability.RESET_PREFIX_CACHE}),
    "digests": frozenset(),
    "health": frozenset({Capability.HEALTH}),
}


def _during(script: Script, mode: PauseMode, what: tuple[During, ...], version: int, chunks: int) -> None:
    moved = Role.MOVED if "sync" in what else Role.STEADY
    for one in what:
        script.need(*NEEDED_DURING[one])
        if one in ("late", "late_long"):
            batch = "prompts.unique(4)" if one == "late" else "prompts.long(2)"
            script.call("generate", batch, *arguments(answer(8)), label="late", role=moved, task="tasks")
        elif one == "pause_again":
            script.call("pause", f'"{mode}"')
        elif one == "reset":
            script.call("reset_prefix_cache")
        elif one == "sync":
            _sync(script, version, chunks)
        else:
            script.call(one)


class Paused(Operation, frozen=True):
    """A batch alone, then again with pauses in it: it ends as if there had been none, or with "abort".

    With a sync during the pause it is asked only once, since what it goes on with is left open.
    """

    mode: PauseMode
    rows: int
    during: tuple[During, ...] = ()
    clear_cache: bool = False
    times: int = 1
    logprobs: bool = False
    version: int = 1
    chunks: int = 1

    def write(self, script: Script) -> None:
        script.need(Capability.PAUSE_KEEP, Capability(f"pause_{self.mode}"))
        script.need(*([Capability.PAUSE_CLEAR_CACHE] if self.clear_cache else []))
        cut = self.mode == "abort" and Capability.RETRY_ABORTED not in script.capabilities
        moved = "sync" in self.during
        script.line(f"{(batch := script.fresh('batch'))} = prompts.unique({self.rows})")
        sampling = arguments(answer(LONG, logprobs=self.logprobs))
        if not moved:
            script.call("generate", batch, *sampling, label="UNINTERRUPTED")
        label, role = ("moved", Role.MOVED) if moved else ("PAUSED", Role.STEADY)
        clear = ", clear_cache=True" if self.clear_cache else ""
        with script.block("async with asyncio.TaskGroup() as tasks:"):
            script.call("generate", batch, *sampling, label=label, role=Role.CUT if cut else role, task="tasks")
            over = cut or self.mode == "wait"  # after one of these nothing is in flight any more
            for _ in range(1 if over else self.times):
                head = f'async with pause_in_flight(stack, "{self.mode}", requests={self.rows}{clear}):'
                with script.block(head):
                    _during(script, self.mode, self.during, self.version, self.chunks)
                    if not self.during:
                        script.line("pass")


class IdlePause(Operation, frozen=True):
    """A pause while nothing is in flight: what comes during it waits."""

    mode: PauseMode
    during: tuple[During, ...]
    version: int = 1
    chunks: int = 1

    def write(self, script: Script) -> None:
        script.need(Capability.PAUSE_KEEP, Capability(f"pause_{self.mode}"))
        head = f'async with asyncio.TaskGroup() as tasks, pause_idle(stack, "{self.mode}", prompts.one()):'
        with script.block(head):
            _during(script, self.mode, self.during, self.version, self.chunks)


class States(Operation, frozen=True):
    """is_paused() before, during and after a pause, and a resume() too many."""

    again: bool = False

    def write(self, script: Script) -> None:
        script.need(Capability.PAUSE_KEEP, Capability.IS_PAUSED)
        script.call("is_paused")
        script.call("pause", '"keep"')
        script.call("is_paused")
        script.call("resume")
        if self.again:
            script.call("resume")
        script.call("is_paused")


class Reset(Operation, frozen=True):
    """reset_prefix_cache()."""

    running: bool = False

    def write(self, script: Script) -> None:
        script.need(Capability.RESET_PREFIX_CACHE)
        script.need(*([Capability.RESET_RUNNING_REQUESTS] if self.running else []))
        script.call("reset_prefix_cache", *(["reset_running_requests=True"] if self.running else []))


Meanwhile = Literal[
    "short", "sessions", "reset", "reset_running", "pickle_client", "digests", "load", "is_paused", "completion"
]
NEEDED_MEANWHILE: dict[Meanwhile, frozenset[Capability]] = {
    "short": frozenset(),
    "sessions": frozenset(),
    "reset": frozenset({Capability.RESET_PREFIX_CACHE}),
    "reset_running": frozenset({Capability.RESET_PREFIX_CACHE, Capability.RESET_RUNNING_REQUESTS}),
    "pickle_client": frozenset({Capability.PICKLE_CLIENT}),
    "digests": frozenset(),
    "load": ADAPTERS,
    "is_paused": frozenset({Capability.IS_PAUSED}),
    "completion": frozenset({Capability.COMPLETION}),
}


class InFlight(Operation, frozen=True):
    """Calls beside a batch that is being answered. None of them may disturb it."""

    rows: int
    meanwhile: tuple[Meanwhile, ...]

    def write(self, script: Script) -> None:
        with script.block("async with asyncio.TaskGroup() as tasks:"):
            script.call("generate", f"prompts.unique({self.rows})", *arguments(answer(LONG)), task="tasks")
            script.line(f"await stack.until_generating(requests={self.rows}, tokens={4 * self.rows})")
            for one in self.meanwhile:
                script.need(*NEEDED_MEANWHILE[one])
                self._write(script, one)

    def _write(self, script: Script, one: Meanwhile) -> None:
        match one:
            case "short":
                script.call("generate", "prompts.ragged(4)", *arguments(SHORT))
            case "sessions":
                Generate(Rows(4), answer(4), ("a", "b")).write(script)
            case "reset":
                Reset().write(script)
            case "reset_running":
                Reset(running=True).write(script)
            case "load":
                Load("one", 2).write(script)
            case "completion":
                Completion(3).write(script)
            case _:
                script.call(one)


# --- weights and adapters -------------------------------------------------------------------------------------------


class Sync(Operation, frozen=True):
    """A weight sync, a look at the parameters, and a cache reset, as trainers do them; between two answers to a batch if so."""

    version: int
    chunks: int = 1
    between: Batch | None = None

    def write(self, script: Script) -> None:
        asked = () if self.between is None else (Ask(self.between),)
        for one in asked:
            one.write(script)
        _sync(script, self.version, self.chunks)
        for one in asked:
            one.write(script)


def _sync(script: Script, version: int, chunks: int) -> None:
    script.need(Capability.WEIGHT_SYNC)
    script.call("sync_weights", str(version), *([f"chunks={chunks}"] if chunks > 1 else []))
    script.call("digests")
    if Capability.RESET_PREFIX_CACHE in script.capabilities:
        script.call("reset_prefix_cache")


class Sleep(Operation, frozen=True):
    """The colocated cycle: sleep, wake, and after level 2 a sync, since the weights are gone."""

    level: Literal[1, 2]
    version: int = 0
    tags: bool = False

    def write(self, script: Script) -> None:
        script.need(Capability.SLEEP)
        script.call("sleep", f"level={self.level}")
        if self.tags:
            script.need(Capability.WAKE_UP_TAGS)
            script.call("wake_up", 'tags=["weights"]')
        else:
            script.call("wake_up")
        if self.level == 2:
            _sync(script, self.version, 1)
        if self.tags:
            script.call("wake_up", 'tags=["kv_cache"]')


class Load(Operation, frozen=True):
    """A version of an adapter, loaded under a name."""

    name: str
    version: int

    def write(self, script: Script) -> None:
        script.need(*ADAPTERS)
        script.call("load_lora_adapter", f'"{self.name}"', str(self.version))
        script.adapters[self.name] = self.version


class Unload(Operation, frozen=True):
    """An adapter goes, if it is there."""

    name: str

    def write(self, script: Script) -> None:
        if self.name in script.adapters:
            script.need(Capability.UNLOAD_ADAPTER)
            script.call("unload_lora_adapter", f'"{self.name}"')
            del script.adapters[self.name]


# --- what is to fail ------------------------------------------------------------------------------------------------


class Mistake(msgspec.Struct, frozen=True):
    """A call that is to fail, and words of which its error must hold one."""

    method: str
    arguments: tuple[str, ...]
    says: tuple[str, ...] = ()
    needs: frozenset[Capability] = frozenset()


_BRIEF = ("max_tokens=4", "temperature=0.0")
_CHAT = _body({"messages": "[{'content': 'no role'}]"}, answer(4)).replace("'", '"')
MISTAKES: dict[str, Mistake] = {
    "empty_prompt": Mistake("generate", ("[*prompts.unique(2), []]", *_BRIEF), ("empty", "prompt")),
    "over_long": Mistake(
        "generate", ("[*prompts.unique(2), prompts.over_long()]", *_BRIEF), ("length", "long", "context", "tokens")
    ),
    "temperature": Mistake("generate", ("prompts.unique(2)", "max_tokens=4", "temperature=-1"), ("temperature",)),
    "max_tokens": Mistake("generate", ("prompts.unique(2)", "max_tokens=0", "temperature=0.0"), ("max_tokens",)),
    "wrong_type": Mistake("generate", ("prompts.unique(2)", "max_tokens=4", 'temperature="hot"')),
    "sessions": Mistake("generate", ("prompts.unique(3)", 'session_ids=["a", "b"]', *_BRIEF), ("session",)),
    "neither": Mistake("generate_request", ('GenerateRequest(sampling_params={"max_tokens": 4})',), ("prompt",)),
    "unknown_adapter": Mistake(
        "generate",
        ("prompts.unique(2)", 'lora_adapter="nobody"', *_BRIEF),
        ("adapter", "lora", "nobody"),
        frozenset({Capability.LORA, Capability.ADAPTER_BY_NAME}),
    ),
    "unknown_model": Mistake(
        "completion",
        (_body({"prompt": "prompts.one()"}, answer(4), model='"no-such-model"'),),
        ("model",),
        frozenset({Capability.COMPLETION}),
    ),
    "malformed_body": Mistake(
        "completion",
        (_body({"prompt": "prompts.unique(2)"}, (("max_tokens", "0"),)),),
        (),
        frozenset({Capability.COMPLETION}),
    ),
    "malformed_chat": Mistake("chat_completion", (_CHAT,), (), frozenset({Capability.CHAT_COMPLETION})),
}  # fmt: skip


class Refused(Operation, frozen=True):
    """Mistakes of the caller's, and a good request after them."""

    mistakes: tuple[str, ...]

    def write(self, script: Script) -> None:
        for name in self.mistakes:
            one = MISTAKES[name]
            script.need(*one.needs)
            script.call(one.method, *one.arguments, label=name, role=Role.DOOMED, attempt=True)
            says = "".join(f', "{word}"' for word in one.says)
            script.check(f'names_error("{name}"{says})')
            if one.method in ("completion", "chat_completion"):
                script.check(f'returns_error("{name}")')
        script.call("generate", "prompts.unique(2)", *arguments(answer(4)))


class Nothing(Operation, frozen=True):
    """An empty batch."""

    def write(self, script: Script) -> None:
        script.call("generate", "[]", *_BRIEF, label="empty", role=Role.DOOMED, attempt=True)
        script.check('nothing_for_nothing("empty")')


class Deaths(Operation, frozen=True):
    """All servers die, one after the other, the first with requests pending. The last thing that is done to a stack."""

    rows: int

    def write(self, script: Script) -> None:
        script.need(Capability.KILL_SERVER, Capability.HEALTH)
        with script.block("async with asyncio.TaskGroup() as callers:"):
            with script.block(f"for prompt in prompts.unique({self.rows}):"):
                sampling = arguments(answer(LONG))
                call = {"label": "pending", "role": Role.DOOMED, "task": "callers", "attempt": True}
                script.call("generate", "[prompt]", *sampling, **call)  # type: ignore[arg-type]
            script.line(f"await stack.until_generating(requests={self.rows}, tokens={4 * self.rows})")
            script.call("kill_server", "stack.servers[0]")
        script.call("health")
        with script.block("for server in stack.servers[1:]:"):
            script.call("kill_server", "server")
        script.call("health", attempt=True)
        script.check("EVERY_CALL_ENDS")
        script.check("HEALTH_FOLLOWS_SERVERS")


# --- a sequence of them ---------------------------------------------------------------------------------------------


class Workload(msgspec.Struct, frozen=True):
    """Operations in their order, and where the engines live meanwhile."""

    operations: tuple[Operation, ...]
    topology: str = "disaggregated"


def script(workload: Workload, capabilities: Collection[Capability]) -> Script:
    """The workload as a scenario for a stack of these capabilities. Raises ValueError for one that it cannot be asked."""
    written = Script(capabilities, workload.topology)
    for operation in workload.operations:
        operation.write(written)
    return written


def as_scenario(
    workload: Workload,
    capabilities: Collection[Capability],
    *,
    red: Collection[str] | None = None,
    promise: str = "",
    source: str = "",
) -> str:
    """The workload as the text of a scenario file that can be run as it is.

    `red` are names of checks: only those are declared, or all that may judge it if none of them is its own.
    """
    written = script(workload, capabilities)
    checks = written.checks()
    if red is not None:
        declared, _ = load(written.text())
        chosen = [code for code, check in zip(checks, declared.checks, strict=True) if check.name in red]
        checks = chosen or ([one for one in checks if one == "ALL_COMPLETE"] or checks)
    return written.text(checks, promise=promise, source=source)


def explored(workload: Workload, capabilities: Collection[Capability]) -> tuple[Scenario, Body]:
    """The scenario that a workload is, with every check that may judge it, and its function."""
    return load(as_scenario(workload, capabilities))


async def run(stack: Stack, workload: Workload) -> None:
    """Drive a workload on a stack."""
    scenario, function = explored(workload, stack.capabilities)
    await function(stack=stack, prompts=Prompts(scenario.name, stack.vocabulary))
