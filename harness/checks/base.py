"""Checks, their evidence and their findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cached_property, wraps
from itertools import zip_longest
from typing import Any, Literal, TypeVar, final

import msgspec

from harness.contract.errors import Blame
from harness.contract.faults import NOTHING, Fact
from harness.contract.messages import METHODS, Generation, Message
from harness.records.recording import Call, Mark, Observation, ScenarioTrace
from harness.records.reference import WIDER, Noise, NoiseRequest, Query, ReferenceBook, Routed, Score
from harness.records.verdict import Cause, Concern, Exposure, FieldEffect, Margin, Visit
from harness.records.wire import as_openai

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)
Status = Literal["pass", "fail", "untestable"]
SHOWN = 3
"""Pieces of evidence in a finding; with more reasons than that, one for each."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found in one scenario.

    `facts` counts the comparisons; `run` turns a pass with zero facts into `untestable`. `reason` is one sentence that
    stays the same from run to run for the same cause, since the ledger matches it; varying numbers go into `evidence`.
    `evidence` holds the smallest inputs and both sides, fit for display.
    """

    status: Status
    facts: int
    reason: str = ""
    reasons: list[str] = []
    """If there are several: each alone. The ledger has to explain every one of them."""
    evidence: list[dict[str, Any]] = []
    blame: Blame | None = None
    numbers: dict[str, float] = {}
    """Measured figures for display, such as {"max_abs_error": …, "bound": …}."""
    margin: Margin | None = None
    """What a numeric check can detect. A pass that would also let the weakest seeded fault pass becomes `untestable`."""
    exposures: list[Exposure] = []
    """What the check found open to callers without credentials, at any severity."""
    effects: list[FieldEffect] = []
    """What became of each field of a request that the check looked at."""
    visits: list[Visit] = []
    """Which call met which state."""
    concerns: list[Concern] = []
    """All that is wrong, not only what is shown."""
    cause: Cause | None = None
    """Set by the judge if no check ran to its end."""


def passed(facts: int, *, margin: Margin | None = None, **numbers: float) -> Finding:
    """All `facts` comparisons held; for numeric ones `margin` says by how much."""
    return Finding(status="pass", facts=facts, numbers=numbers, margin=margin)


def failed(facts: int, reason: str, evidence: Sequence[dict[str, Any]] = (), **numbers: float) -> Finding:
    """At least one comparison did not hold: the stack is to blame. `evidence` has an item for everything that is wrong, as far
    as the check knows it; its "call" and "row" say where."""
    concerns = dict.fromkeys((item["call"], item.get("row")) for item in evidence if item.get("call") is not None)
    return Finding(
        status="fail",
        facts=facts,
        reason=reason,
        evidence=list(evidence)[:SHOWN],
        concerns=list(concerns),
        blame=Blame.STACK,
        numbers=numbers,
    )


def concluded(
    facts: int, wrong: Iterable[tuple[str, dict[str, Any]]], *, margin: Margin | None = None, **numbers: float
) -> Finding:
    """Passed, or failed with every reason in `wrong`: (reason, evidence) of each comparison that did not hold.

    A check judges on after the first thing that is wrong, since a known error must not hide a new one.
    """
    by_reason: dict[str, list[dict[str, Any]]] = {}
    for reason, shown in wrong:
        by_reason.setdefault(reason, []).append(shown)
    if not by_reason:
        return passed(facts, margin=margin, **numbers)
    each = (failed(0, reason, by_reason[reason]) for reason in sorted(by_reason))
    return msgspec.structs.replace(together(each), facts=facts, numbers=numbers)


def together(findings: Iterable[Finding]) -> Finding:
    """Several findings of one check as one: all that fails; else what is untestable; else the first. At least one is needed."""
    first, *_ = found = list(findings)
    facts = sum(one.facts for one in found)
    wrong = [one for one in found if one.status == "fail"]
    untold = [one for one in found if one.status == "untestable"]
    if len(wrong) < 2:
        return untold[0] if untold and not wrong else msgspec.structs.replace((wrong or [first])[0], facts=facts)
    reasons = sorted({reason for one in wrong for reason in one.reasons or [one.reason]})
    told = [[{"why": one.reason} | shown for shown in one.evidence] for one in wrong]
    in_turn = [shown for turn in zip_longest(*told) for shown in turn if shown is not None]
    return Finding(
        status="fail",
        facts=facts,
        reason="; ".join(reasons),
        reasons=reasons if len(reasons) > 1 else [],
        evidence=in_turn[: max(SHOWN, len(reasons))],
        concerns=list(dict.fromkeys(concern for one in wrong for concern in one.concerns)),
        blame=Blame.STACK,
        numbers={name: value for one in wrong for name, value in one.numbers.items()},
    )


def untestable(reason: str, blame: Blame = Blame.HARNESS, evidence: Sequence[dict[str, Any]] = ()) -> Finding:
    """Nothing could be judged: never a pass."""
    return Finding(status="untestable", facts=0, reason=reason, blame=blame, evidence=list(evidence)[:SHOWN])


UNTOLD = "(not told)"


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One request as an engine ran it, assembled from the tap's observations."""

    server: str
    request_id: str
    prompt: tuple[int, ...]
    sampling_params: dict[str, Any]
    tokens: tuple[int, ...]
    finish_reason: str | None
    started_ns: int
    ended_ns: int | None
    step_ns: tuple[int, ...]
    """When each of `tokens` was produced; as long as `tokens`."""
    cache_salt: str | None = None
    """`UNTOLD` in a recording from before the taps wrote it down."""


@final
class Evidence:
    """One scenario of one recording, with the oracle's answers beside it. Read-only."""

    def __init__(self, trace: ScenarioTrace, reference: ReferenceBook) -> None:
        self.trace = trace
        self.reference = reference
        self.kept: dict[Any, Any] = {}
        """Results that several checks share (`kept`)."""

    @property
    def header(self) -> Any:
        return self.trace.header

    @property
    def exact(self) -> bool:
        """True if the engines compute in float32, whose noise hides no seeded fault and no draw."""
        return bool(self.header.model["dtype"] == "float32")

    @property
    def noise_question(self) -> NoiseRequest:
        """The question to the oracle about the engines' arithmetic. In float32 it leaves out quantization, whose share
        `Score.rounding` gives for each answer."""
        return NoiseRequest(quantization=None if self.exact else self.header.topology.quantization)

    @property
    def repeatable(self) -> bool:
        """True if the same request gives the same tokens every time: in float32, and on batch-invariant engines."""
        return self.exact or bool(self.header.batch_invariant)

    @cached_property
    def noise(self) -> Noise:
        """How far rounding moves right log-probabilities from the oracle's."""
        return self.reference.noise(self.noise_question)

    def followed(self, routed: Routed) -> Routed:
        """Experts that the oracle takes at near ties: those returned with an answer, or none in float32."""
        return [] if self.exact else routed

    def near(self, score: Score) -> float:
        """A bound in nats: a right engine stays within it of these log-probabilities, and two tokens within it are a near tie.

        The rounding of the dtype was measured. A quantized activation between two steps may round either way, and later values
        follow it. Few do so in an engine, far more in the reference's trials. The bound allows twice the largest move of any
        token of the answer in these trials. In 16 bits the noise was measured with such activations; it was not measured with
        each version of the weights. Where it leaves a doubt about an answer, twice the largest move in that answer counts.
        """
        own = WIDER * max(score.rounding, default=0.0)
        if self.exact:
            return self.noise.near + own
        return self.noise.near if self.noise_question.quantization else max(self.noise.near, own)

    def explained(self, score: Score, error: float) -> bool:
        """True if log-probabilities of an answer that are off by more than the noise, by `error` nats, are so by the rounding of this
        very answer. They are right, and say nothing of what a check can detect."""
        return self.noise.near < error <= self.near(score)

    def calls(self, method: str | None = None, label: str | None = None) -> list[Call]:
        """The scenario's own calls in order of their start, by method and label. An http() call of an OpenAI route counts as
        completion() or chat_completion() (`harness.records.wire`)."""
        if (method, label) not in self._calls:
            self._calls[method, label] = [
                c
                for c in self._own_calls
                if (method is None or c.method == method) and (label is None or c.label == label)
            ]
        return [*self._calls[method, label]]

    def succeeded(self, method: str) -> list[Call]:
        """The scenario's own calls of a method that raised no error, in order of their start."""
        return [call for call in self.calls(method) if call.error is None]

    @cached_property
    def _calls(self) -> dict[tuple[str | None, str | None], list[Call]]:
        """What `calls` has found: checks ask for the same calls again, some once per row."""
        return {}

    @cached_property
    def _own_calls(self) -> list[Call]:
        """Sorted once: every check reads them, some once per row."""
        return sorted(map(as_openai, self.trace.own_calls), key=lambda c: c.started_ns)

    @cached_property
    def _syncs(self) -> list[Call]:
        return [c for c in self._own_calls if c.method == "sync_weights" and c.error is None]

    @cached_property
    def began_ns(self) -> int:
        """When the clean room ended: requests that engines took up earlier are not the scenario's."""
        return self.trace.began_ns

    @cached_property
    def all_executions(self) -> list[Execution]:
        """Every request that any engine ran, including the clean room's canary."""
        return list(_executions(self.trace.observations))

    @cached_property
    def executions(self) -> list[Execution]:
        """Every request that any engine ran in this scenario (its time excludes the clean room's canary)."""
        return [e for e in self.all_executions if e.started_ns >= self.began_ns]

    def controls(self, op: str | None = None) -> list[Observation]:
        """Control calls that reached an engine, in order of time."""
        return sorted(
            (o for o in self.trace.observations if o.kind == "control" and (op is None or o.data["op"] == op)),
            key=lambda o: o.at_ns,
        )

    def marks(self, name: str) -> list[Mark]:
        """The scenario's marks of this name, in order of time."""
        return [mark for mark in self.trace.own_marks if mark.name == name]

    def version_at(self, at_ns: int) -> int:
        """The policy version of the last sync completed at that time; 0 before the first sync."""
        version = 0
        for call in self._syncs:
            if call.ended_ns <= at_ns:
                version = call.request["version"]
        return version

    def adapter_at(self, call: Call) -> int | None:
        """The version of the LoRA adapter that a call requested: the last one loaded under its name before the call; None if that
        name was unloaded since. An OpenAI-style body names the adapter in "model"."""
        name = call.request.get("lora_adapter") or (call.request.get("body") or {}).get("model")
        before = [c for c in self._adapter_changes if c.request["name"] == name and c.ended_ns <= call.started_ns]
        return before[-1].request.get("version") if before else None

    @cached_property
    def _adapter_changes(self) -> list[Call]:
        """Successful loads and unloads, in order."""
        changes = [*self.calls("load_lora_adapter"), *self.calls("unload_lora_adapter")]
        return sorted((c for c in changes if c.error is None), key=lambda c: c.started_ns)


def _executions(observations: Iterable[Observation]) -> Iterable[Execution]:
    started: dict[tuple[str, str], Observation] = {}
    made: defaultdict[tuple[str, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    finished: dict[tuple[str, str], Observation] = {}
    for seen in sorted(observations, key=lambda o: o.at_ns):
        match seen.kind:
            case "step":
                server, at_ns = seen.server, seen.at_ns
                for request_id, new in seen.data["tokens"].items():
                    tokens, times = made[server, request_id]
                    tokens += new
                    times += (at_ns,) * len(new)
            case "request":
                started[seen.server, seen.data["request_id"]] = seen
            case "finish":
                finished[seen.server, seen.data["request_id"]] = seen
            case _:
                pass
    for at, first in started.items():
        last = finished.get(at)
        tokens, times = made[at]
        yield Execution(
            server=first.server,
            request_id=first.data["request_id"],
            prompt=tuple(first.data["prompt_token_ids"]),
            sampling_params=first.data["sampling_params"],
            tokens=tuple(tokens),
            finish_reason=last.data["reason"] if last else None,
            started_ns=first.at_ns,
            ended_ns=last.at_ns if last else None,
            step_ns=tuple(times),
            cache_salt=first.data.get("cache_salt", UNTOLD),
        )


def kept(of: Callable[[Evidence], _T]) -> Callable[[Evidence], _T]:
    """Computes the function once per evidence, for all checks."""

    @wraps(of)
    def looked_up(evidence: Evidence) -> _T:
        if of not in evidence.kept:
            evidence.kept[of] = of(evidence)
        found: _T = evidence.kept[of]
        return found

    return looked_up


EVERY = "*"


class Tap(Enum):
    """Whether a check reads the engine tap. A check that does is untestable if the tap saw nothing."""

    UNREAD = "unread"
    READ = "read"
    """The tap must have seen the clean room's canary request."""
    READ_EVERYWHERE = "read everywhere"
    """The same, and the tap must have seen something of every server."""


@final
class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One promise, judged on one scenario of one stack.

    `fault` describes the fault that the check must catch; the tests and the kill matrix show that it does.
    `queries` lists the questions that the oracle must answer before `judge` runs; it is pure too.
    """

    name: str
    fault: str
    source: str
    """Where the rule is written, by public name: "SkyRL #934", "vLLM documentation, Sleep Mode"."""
    reads: Fact = NOTHING
    """Facts that must be true for the check to pass. A fault that corrupts one of them may turn the check red."""
    falsifies: Fact = NOTHING
    """Facts that are false if the check fails: other checks that read them may be red for that reason alone."""
    next_step: str = ""
    """What to look at first if the check fails, in one sentence. If empty, reports give the advice for the blame."""
    tap: Tap = Tap.UNREAD
    errors_of: str | None = None
    """Label of the calls whose errors it judges ("" for calls without one), `EVERY` for all; None if it judges none."""
    judge: Callable[[Evidence], Finding | None]
    """Only a check of every scenario (`checks/always.py`) may return None: nothing to judge here."""
    silent: bool = False
    """True if the promise holds where there is nothing to judge: a stack that is silent there is not compared with one that passes."""
    queries: Callable[[Evidence], Iterable[Query]] = lambda _: ()


def generation(call: Call) -> Generation:
    """The result of a generate or sample call, typed. The call must have succeeded."""
    if call.result is None:
        raise ValueError(f"call {call.id} ({call.method}) has no result: {call.error}")
    return msgspec.convert(call.result, Generation)


def request(call: Call, kind: type[_M]) -> _M:
    """The request of a call, typed."""
    assert METHODS[call.method].request is kind
    return msgspec.convert(call.request, kind)


def stop_strings(params: dict[str, Any]) -> list[str]:
    """The requested stop strings."""
    stop = params.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)
