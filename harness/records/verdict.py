"""Verdicts: what judge and parity say, with blame. The report, the ledger and the gate read nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

import msgspec

from harness.contract.capability import Capability
from harness.contract.checkout import Checkout
from harness.contract.errors import Blame
from harness.records.recording import CallError


class Conformance(StrEnum):
    """One stack against the contract."""

    PASS = "pass"
    FAIL = "fail"
    MISSING = "missing"
    """The stack does not declare a capability that the scenario needs. Red only where the comparison says so."""
    UNTESTABLE = "untestable"
    """Could not be judged; blame says why. Red."""


class Parity(StrEnum):
    """Two stacks against each other."""

    PARITY = "parity"
    """Both conform. Their outputs are equal, or closer than the baseline is to its own twin."""
    OPEN = "open"
    """Both conform but differ in something that the contract does not define. Shown, not red by itself."""
    REGRESSION = "regression"
    """The baseline conforms, the candidate does not. Red."""
    BASELINE_DEFECT = "baseline-defect"
    """The candidate conforms, the baseline does not. Red on the baseline's side only."""
    BOTH_WRONG = "both-wrong"
    """Neither conforms: no parity credit, however equal. Red."""
    MISSING = "missing"
    """The baseline has a needed capability, the candidate lacks it. Red."""
    ADDED = "added"
    """The candidate has a needed capability, the baseline lacks it. Only conformance is judged."""
    UNTESTABLE = "untestable"
    """One of the two could not be judged. Red."""


RED: frozenset[str] = frozenset({Conformance.FAIL, Conformance.UNTESTABLE, Parity.REGRESSION, Parity.BOTH_WRONG})
"""Statuses that are red in either kind of verdict. `missing` is red in a comparison only: see `Verdict.red`."""
WORST_FIRST: tuple[str, ...] = (
    Parity.REGRESSION,
    Parity.BOTH_WRONG,
    Conformance.FAIL,
    Conformance.UNTESTABLE,
    Conformance.MISSING,
    Parity.BASELINE_DEFECT,
    Parity.OPEN,
    Parity.ADDED,
    Parity.PARITY,
    Conformance.PASS,
)
"""All statuses of either kind. The first one among several takes stands for all of them. Reports use this order."""


UNEXPLAINED = "unexplained"
Concern = tuple[int | str, int | None]
"""(a call's id or label, row of it). Row None: the whole call."""


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """What a numeric check measured, its bound, and what it would have measured under seeded faults.

    Faults are seeded offline into the recording. A fault whose measurement is not above `bound` would have passed.
    """

    unit: str
    measured: float
    bound: float
    faults: dict[str, float] = {}
    """Name of each seeded fault → what the check would have measured. Faults that cannot be seeded here are left out."""
    false_alarm_rate: float | None = None
    """Probability that a correct stack turns red. Set by statistical checks."""
    power: float | None = None
    """Probability that the weakest fault turns red. Set by statistical checks."""

    @property
    def weakest(self) -> str | None:
        """Name of the seeded fault that is nearest to passing."""
        return min(self.faults, key=self.faults.__getitem__, default=None)


class Cause(StrEnum):
    """Why a verdict is not its check's own finding."""

    NOT_DRIVEN = "not driven"
    """The scenario did not reach its end."""
    RAISED = "raised"
    """The check itself broke."""
    NOT_OFFERED = "not offered"
    """The target lacks a capability that the scenario needs."""
    NOT_HERE = "untestable here"
    """The target has the capability, but this start cannot show it, for example without a GPU."""


class Severity(StrEnum):
    """Severity of something that is open to a caller without credentials."""

    CRITICAL = "critical"
    """The caller can run its own code."""
    HIGH = "high"
    """Control or weights at the address for generation, or a port that other machines reach."""
    MEDIUM = "medium"
    """Control or weights at a server's own address."""
    LOW = "low"
    """Information."""


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is open to a caller without credentials. Critical and high ones fail their check."""

    severity: Severity
    where: str
    """The address, or the process that holds a socket."""
    what: str
    by: list[str]
    """Routes with the status of their answer, or addresses."""


class How(StrEnum):
    """What becomes of something that the two clients offer."""

    GONE = "gone"
    RENAMED = "renamed"
    """The candidate has it under another name."""
    DEFAULT = "other default"
    FORM = "other signature"
    """Async instead of sync, or an argument that is given in another way."""
    TYPE = "other type"
    """Another annotation, of the thing itself or of a method's result."""
    REQUIRED = "new requirement"
    """A method of both clients has an argument more that has to be given."""
    MEANING = "other meaning"
    """The same signature does something else: a scenario shows it."""
    NEW = "new"
    """The candidate alone has it. A caller has to change nothing."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something in which the candidate's client is not the baseline's."""

    name: str
    how: How
    baseline: str = ""
    """What the baseline offers there, as text. Empty if nothing."""
    candidate: str = ""
    do: str = ""
    """What the caller has to do. Empty if no entry of ``scenarios/client_changes.toml`` says it: that is red."""
    source: str = ""
    """File and line of the released source, from the entry."""

    @property
    def bare(self) -> bool:
        """True if a caller has to change it, and no entry says how."""
        return not self.do and self.how is not How.NEW


class Effect(StrEnum):
    """What became of a field of a request. As usual: nothing that was observed differs from the request without the field, since
    the value is the default, or the field is for something else than the engine."""

    TOOK_EFFECT = "took effect"
    AS_USUAL = "as usual"
    REFUSED = "refused"
    """By an error that names the field."""
    REFUSED_NAMELESS = "refused without its name"
    DROPPED = "dropped"
    """The engine ran the request as without the field."""
    CHANGED = "changed"
    """The engine got another value."""
    UNTOLD = "not told"
    """No answer came, and none to an earlier request either."""
    NO_ROUTE = "not offered"
    """The address has no such route."""
    BROKE = "broke"
    """A server error, an error without a name, or no answer in time."""


class FieldEffect(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one call's request, with one kind of value (`fixtures.request_fields`)."""

    call: str
    field: str
    given: str
    """"negative", "of type string", …"""
    effect: Effect


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """A call that met a stack in a state (`harness.contract.states`)."""

    step: str
    """"pause keep", "generate", …"""
    state: str
    """"paused (keep), asleep (level 2)", …"""
    requests: str
    """What the stack's requests did meanwhile."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One statement about one check (or one compared facet) of one scenario."""

    scenario: str
    wave: int
    task: int
    promise: str
    topology: str
    """Name of the topology ("disaggregated")."""
    check: str
    """Name of the check; for compared outputs the facet ("outputs.tokens", "outputs.logprobs", …)."""
    target: str
    """The stack judged; in a comparison the candidate."""
    baseline: str | None = None
    """Set in a comparison."""
    status: str
    """A `Conformance` value, or a `Parity` value when `baseline` is set."""
    blame: Blame | None = None
    reason: str = ""
    """One sentence, the same from run to run for the same cause. Numbers that vary are in `numbers` and `evidence`."""
    reasons: list[str] = []
    """If several things are wrong: the reason of each alone."""
    cause: Cause | None = None
    """None if the check judged."""
    facts: int = 0
    """Number of compared facts."""
    numbers: dict[str, float] = {}
    margin: Margin | None = None
    """Set by a numeric check that found nothing wrong."""
    takes: int = 1
    """Number of takes that this verdict stands for. It is the worst of them."""
    alike: int = 1
    """Number of these takes with this status."""
    causes: dict[str, int] = {}
    """Of an open difference: cause → number of places. `UNEXPLAINED` counts the places without a cause."""
    concerns: list[Concern] = []
    """Everything that a red check found wrong. A comparison of the two stacks sets it aside."""
    evidence: list[dict[str, Any]] = []
    """Both sides and the smallest input seen. Model output is data from outside: renderers escape it."""
    exposures: list[Exposure] = []
    """What the check found open, red or not."""
    changes: list[Change] = []
    """Of the census: everything that a caller has to change."""

    left_out: int = 0
    """Cases that the scenario enumerates and the budget of the run left out."""
    effects: list[FieldEffect] = []
    """What became of each field of a request."""
    visits: list[Visit] = []
    """Of a sequence: which call met which state."""
    fault: str = ""
    """The fault that the check exists for."""
    source: str = ""
    """Where the rule is written."""
    next_step: str = ""
    because: str | None = None
    """Name of the red check of the same scenario, topology and stack that explains this red verdict."""
    known: str | None = None
    """Id of the ledger entry that explains this verdict; with several reasons, of the entry for the first."""
    explained: dict[str, str] = {}
    """Reason → id of the ledger entry that explains it. The verdict is known only if every reason is explained."""

    @property
    def each_reason(self) -> list[str]:
        return self.reasons or [self.reason]

    @property
    def told(self) -> str:
        """The reason, for a reader: beside known reasons only those that the ledger does not explain, and the entries' ids."""
        new = [reason for reason in self.each_reason if reason not in self.explained]
        if not new or not self.explained:
            return self.reason
        return f"{'; '.join(new)} (known beside it: {', '.join(sorted(set(self.explained.values())))})"

    @property
    def red(self) -> bool:
        """True if this verdict fails the run. A verdict that the ledger explains does not."""
        if self.known is not None:
            return False
        return self.status in RED or (self.baseline is not None and self.status == Parity.MISSING)

    @property
    def id(self) -> str:
        """Stable name: scenario@topology::check[target] or [baseline~target]."""
        pair = f"{self.baseline}~{self.target}" if self.baseline else self.target
        return f"{self.scenario}@{self.topology}::{self.check}[{pair}]"


class NoiseFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one numeric check over a whole run: its values on correct stacks, its bound, its values under faults."""

    check: str
    """The check without its label, or the compared facet."""
    unit: str
    floor: float
    """The largest value that passed; for a facet, between the baseline and its own twin."""
    bound: float
    """Larger values are red."""
    weakest_fault: float | None = None
    """The smallest value under a seeded fault; None if none was measured."""
    faults: dict[str, float] = {}
    """Name of each seeded fault → the value under it in this run's recordings, where it is hardest to see."""
    facts: int = 0
    false_alarm_rate: float | None = None
    """The largest rate of one verdict. Set by statistical checks."""
    power: float | None = None
    """The smallest probability that one verdict finds the weakest fault."""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's log-probabilities minus the rollouts', in nats, over all tokens of one training step."""

    step: int
    tokens: int
    mean: float
    """Mean absolute difference."""
    p99: float
    """99th percentile of the absolute difference."""
    largest: float
    outside: float
    """Share of tokens whose importance ratio, exp(trainer - rollout), is outside 1 ± 0.1."""
    k3: float
    """The k3 estimate of the KL divergence (Schulman, "Approximating KL Divergence"): mean of r - 1 - log r; r is that ratio."""


class GapCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The gap per step of one training scenario on one stack, from its first take."""

    scenario: str
    topology: str
    target: str
    bound: float | None
    """Largest allowed gap of a token, in nats; None if rollouts may be older than the trained policy."""
    steps: list[Gap]


def _arithmetic(header: dict[str, Any]) -> Iterator[str]:
    """The engines' arithmetic in words, from a recording's header. Only GPUs have CUDA graphs."""
    if "dtype" in header.get("model", {}):
        yield header["model"]["dtype"]
    if header.get("engine") == "cuda":
        yield "CUDA graphs" if header.get("cuda_graphs") else "eager"
    if header.get("batch_invariant"):
        yield "batch-invariant"


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a run: enough to reproduce it and to show the basis of its verdicts."""

    run_id: str
    created_at: str
    """UTC, ISO 8601."""
    command: str
    """A command line that repeats the run."""
    baseline: str | None
    candidate: str | None
    recorded: str | None = None
    """The folder of the earlier run that holds the baseline's recordings; None if this run drove the baseline."""
    start: str
    """"ray" (as SkyRL ships it), "fork" (development) or "inline" (no real stack). Only with "ray" can the gate say yes."""
    engine: str
    profile: str | None = None
    """The profile that the user named; None: the default for the step from baseline to candidate."""
    headers: list[dict[str, Any]] = []
    """The headers of the recordings that were judged, as JSON."""
    seconds: dict[str, float] = {}
    """Wall time by stage: environment, start, drive, judge, report."""
    outcome: str = "completed"
    """"completed", or why the run ended early."""
    whole_waves: list[int] = []
    """Waves of which all was selected that a run drives by default. A report says for these alone what was never exercised."""
    selected: dict[str, list[str]] = {}
    """Topology → its selected scenarios. Merging adds them up to find the whole waves of a sharded run."""
    contract: dict[str, str] = {}
    """What the stacks were driven by: a module of scenarios, or what else drives a stack → a hash of it. Empty in older runs."""
    declared: dict[str, list[Capability]] = {}
    """Target → capabilities that it declares before its start. A scenario that needs more is missing without a start."""
    checkouts: dict[str, Checkout] = {}
    """Target → its source tree, if it was not the one of its environment."""
    not_started: dict[str, CallError] = {}
    """"target@topology" of each stack that did not start → why."""

    @property
    def computed(self) -> str:
        """The engines' arithmetic, such as "cuda, bfloat16, eager". If it differs, each variant names its stacks. Only the engine
        if nothing was recorded."""
        stacks: dict[str, dict[str, None]] = {}
        for header in self.headers:
            stacks.setdefault(", ".join([self.engine, *_arithmetic(header)]), {})[str(header.get("target"))] = None
        if len(stacks) < 2:
            return next(iter(stacks), self.engine)
        return "; ".join(f"{way} ({', '.join(names)})" for way, names in sorted(stacks.items()))


class LedgerProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger entry's problem in this run: stale, expired, over its cap, reason changed. Red."""

    entry: str
    problem: str
    next_step: str


class Concession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place where the suite gives way because a stack differs. The head of ``scenarios/concessions.toml`` explains the fields."""

    id: str
    kind: Literal["capability", "precondition", "check", "translation", "set-up", "patch", "cpu"]
    place: str
    name: str
    stacks: list[str]
    what: str
    why: str
    hides: str = ""
    take_back: str = ""


class OpenCause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of open differences between two stacks, over a whole run."""

    pair: str
    """"baseline~candidate"."""
    cause: str
    """A cause of `harness/judging/causes.py`, or `UNEXPLAINED`."""
    verdicts: int
    places: int
    """Rows, sessions or fields."""
    scenarios: list[str]
    source: str = ""
    """The released code behind it, from its entry. Empty if it has none: it counts against the gate."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """May the candidate replace the baseline? `reasons` lists every objection that stands, worst first."""

    question: str
    """The question in words, with the profile."""
    may_replace: bool
    profile: str
    """Name of the profile that says which objections stand (``scenarios/profiles.toml``)."""
    means: str = ""
    """What a yes means, and why this profile was asked for."""
    reasons: list[str]
    aside: list[str] = []
    """Objections that do not stand against the step under this profile."""
    left_out: list[str] = []
    """Bullets of the plan that were judged without some of their scenarios, because of `needless`."""
    needless: str = "neither stack offers"
    """Which scenarios need no evidence: those that … (a relative clause)."""


class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to drive one scenario on one stack."""

    scenario: str
    topology: str
    target: str
    takes: int
    seconds: float
    """Wall time of all takes, with their clean rooms. Simulated on a stack that runs inline."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a report shows. Reports compute nothing."""

    run: RunInfo
    verdicts: list[Verdict]
    ledger_problems: list[LedgerProblem] = []
    released: dict[str, str | None] = {}
    """Stack that is a release under another name → the released target whose ledger entries hold for it; None: no released target
    has its version, and no entry holds."""
    drives: list[Drive] = []
    noise: list[NoiseFloor] = []
    gaps: list[GapCurve] = []
    never_called: dict[str, list[str]] = {}
    """Stack → methods of its client that no call of the run called, and arguments that none gave: "sleep", "sleep(tags)". What the
    stack's own code calls inside does not count. Only where whole waves were driven."""
    open_causes: list[OpenCause] = []
    """Worst first."""
    concessions: list[Concession] = []
    """Those that are for the run's stacks."""
    gate: Gate | None = None

    @property
    def exit_status(self) -> int:
        """0 only when everything judged is green or in the ledger, and something was judged at all."""
        if not self.verdicts or self.ledger_problems or self.run.outcome != "completed":
            return 1
        return int(any(v.red for v in self.verdicts))
