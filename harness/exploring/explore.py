"""Random workloads on a stack, judged by the suite's own checks: what no scenario thought of is found, and shrunk.

A *sequence* is one workload, driven on a stack that is put together anew for it, so that what was found is found again when it is
driven alone. Sequences follow from a seed. What a search says of a seeded fault is the power of the search; what it
finds on a correct stack is a defect of the stack, of a check, or of the workloads.
"""

from __future__ import annotations

import difflib
import random
import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self, final

import msgspec

from fixtures.prompts import Prompts
from harness.contract.capability import Capability
from harness.contract.errors import HarnessError, UsageError
from harness.contract.faults import DRIVEN, Fault, family
from harness.contract.messages import METHODS
from harness.contract.topology import Topology
from harness.exploring import workloads
from harness.exploring.scripts import Body
from harness.exploring.workloads import Workload
from harness.machine.progress import silent
from harness.machine.targets import Target, known
from harness.proving.kill_matrix import CAUGHT_BY_UNTESTABLE, settled
from harness.records.verdict import Cause, Conformance, Verdict
from harness.running.session import Options, Seat, Session
from harness.suite.scenario import Scenario

EXAMPLES = 200
"""Sequences of a search, unless another number is asked for."""
SHORTEST, GROWS_EVERY = 3, 4
"""Operations that each half of a search's first sequences has at most, and after how many sequences it is one more: what a
short sequence shows is found by a short one."""
ENGINES = 2
JUDGED = "judged"
"""In place of a check: of a whole sequence nothing was judged."""

Tell = Callable[[str], None]
"""Is told lines for whoever waits."""
Told = Callable[[int, int], None]
"""Is told of each green sequence: its number, and how many verdicts there are by now."""


@final
class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for."""

    stack: str = "miniature"
    fault: str | None = None
    """Id of the seeded fault that the stack is broken with."""
    examples: int = EXAMPLES
    seed: int = 0

    @property
    def command(self) -> str:
        """A command line that repeats the search."""
        fault = [] if self.fault is None else ["--fault", self.fault]
        words = ["parity", "explore", "--stack", self.stack, *fault, "--examples", str(self.examples)]
        return shlex.join([*words, "--seed", str(self.seed)])


@final
class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence came to."""

    findings: tuple[Verdict, ...]
    """What is wrong; none if all is well."""
    judged: int
    """Checks that found something to judge."""
    fired: int = 0
    """How often the seeded fault took effect in it."""

    @property
    def families(self) -> frozenset[str]:
        """The checks that turned red, without their labels."""
        return frozenset(family(verdict.check) for verdict in self.findings)


@final
class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence in which something is wrong."""

    number: int
    """Which one of the search it was, from 1."""
    workload: Workload
    outcome: Outcome


@final
class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What a search came to."""

    sequences: int
    """How many were driven."""
    judged: int
    """Verdicts of checks that found something to judge, over all of them."""
    fired: int = 0
    found: Found | None = None


def findings(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """What is wrong with a sequence: failed checks, checks that broke, one that did not reach its end, or nothing judged.

    A check that has nothing to judge is no finding: a random sequence gives most checks nothing of their kind.
    """
    found = [v for v in settled(verdicts) if _wrong(v)]
    if not found and not any(v.status == Conformance.PASS for v in verdicts):
        first = verdicts[0]
        return [
            msgspec.structs.replace(first, check=JUDGED, status=Conformance.UNTESTABLE, reason="nothing was judged")
        ]
    return found


def _wrong(verdict: Verdict) -> bool:
    blind = verdict.status == Conformance.UNTESTABLE and family(verdict.check) in CAUGHT_BY_UNTESTABLE
    return verdict.status == Conformance.FAIL or verdict.check == DRIVEN or blind or verdict.cause == Cause.RAISED


@final
class Explorer:
    """A stack that sequences are driven on, correct or under a seeded fault. Leaving the context ends all that runs."""

    def __init__(self, target: str, folder: Path | None = None) -> None:
        self.target = explorable(target)
        self.capabilities = frozenset(self.target.capabilities)
        self._folder = Path(tempfile.mkdtemp(prefix="parity-explore-")) if folder is None else folder
        self._sessions: dict[Topology, Session] = {}
        self._scenarios: dict[bytes, tuple[Scenario, Body]] = {}

    def drive(self, workload: Workload, fault: Fault | None = None) -> Outcome:
        """One sequence on a fresh stack, judged by all that may judge it."""
        scenario, function = self._scenario(workload)
        return self.drive_scenario(scenario, function, fault)

    def drive_scenario(self, scenario: Scenario, function: Body, fault: Fault | None = None) -> Outcome:
        """A scenario on a fresh stack, judged by its own checks."""
        [topology] = scenario.driven_in(ENGINES)
        seat = Seat(target=self.target.name, topology=topology)
        session = self._session(topology)
        session.inject(seat, fault)
        verdicts = session.drive(
            scenario, seat, lambda stack: function(stack=stack, prompts=Prompts(scenario.name, stack.vocabulary))
        )
        fired = session.inject(seat, None)
        judged = sum(v.status in (Conformance.PASS, Conformance.FAIL) for v in verdicts)
        return Outcome(findings=tuple(findings(verdicts)), judged=judged, fired=fired)

    def _scenario(self, workload: Workload) -> tuple[Scenario, Body]:
        """Written and read once: the same workloads are driven under many faults."""
        name = msgspec.json.encode(workload)
        if name not in self._scenarios:
            self._scenarios[name] = workloads.explored(workload, self.capabilities)
        return self._scenarios[name]

    def _session(self, topology: Topology) -> Session:
        if topology not in self._sessions:
            options = Options(
                baseline=self.target.name, candidate=self.target.name, stacks=[self.target.name], engine="cpu",
                engines=ENGINES, run_dir=self._folder / topology.name, twin=False, fault_taps=True, record=False,
                command="parity explore",
            )  # fmt: skip
            self._sessions[topology] = Session(options, silent)
        return self._sessions[topology]

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def explorable(name: str) -> Target:
    """The target of that name. Raises UsageError for one that cannot be put together anew in no time."""
    target = known(name)
    if not target.inline or not target.capabilities & {method.capability for method in METHODS.values()}:
        raise UsageError(
            f"{name} cannot be explored: hundreds of sequences need a stack of nothing but Python",
            next_step="explore miniature or miniature:retry, and drive what is found on any stack, as a scenario",
        )
    return target


def sequences(capabilities: frozenset[Capability], count: int, seed: int) -> Iterator[Workload]:
    """The first `count` workloads of a seed, each drawn on its own. Raises UsageError without Hypothesis."""
    return (_drawn(capabilities, seed, number) for number in range(1, count + 1))


@lru_cache(maxsize=1024)
def _drawn(capabilities: frozenset[Capability], seed: int, number: int) -> Workload:
    drawn: list[Workload] = []

    def draw(workload: Workload) -> bool:
        drawn.append(workload)
        return False

    _find(capabilities, seed, number, draw)
    return drawn[-1]


def _find(
    capabilities: frozenset[Capability], seed: int, number: int, wanted: Callable[[Workload], bool]
) -> Workload | None:
    """The smallest workload that is `wanted`, from the seed's workload of that number on; None if not even that one is."""
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis.errors import NoSuchExample

    from harness.exploring.strategies import LONGEST
    from harness.exploring.strategies import workloads as strategy

    quiet = settings(
        max_examples=2,  # Hypothesis begins with the simplest of all; what it draws third is like what it drew second
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        longest = min(LONGEST, SHORTEST + number // GROWS_EVERY)
        chance = random.Random(f"{seed} {number}")
        return find(strategy(capabilities, longest), wanted, settings=quiet, random=chance)
    except NoSuchExample:
        return None


def search(
    explorer: Explorer, drawn: Iterable[Workload], fault: Fault | None = None, tell: Told | None = None
) -> Search:
    """Drive sequences until something is wrong with one, or all are driven."""
    number = judged = fired = 0
    for number, workload in enumerate(drawn, start=1):
        outcome = explorer.drive(workload, fault)
        judged, fired = judged + outcome.judged, fired + outcome.fired
        if outcome.findings:
            found = Found(number=number, workload=workload, outcome=outcome)
            return Search(sequences=number, judged=judged, fired=fired, found=found)
        if tell is not None:
            tell(number, judged)
    return Search(sequences=number, judged=judged, fired=fired)


def shrink(
    explorer: Explorer, found: Found, *, seed: int, fault: Fault | None = None, tell: Tell | None = None
) -> Found:
    """The smallest sequence in which one of the same checks turns red. `seed` is that of the search."""
    from hypothesis.errors import Flaky

    seen: dict[bytes, Outcome] = {msgspec.json.encode(found.workload): found.outcome}
    best = found

    def wanted(workload: Workload) -> bool:
        nonlocal best
        name = msgspec.json.encode(workload)
        if name not in seen:
            seen[name] = explorer.drive(workload, fault)
        outcome = seen[name]
        hit = bool(outcome.families & found.outcome.families)
        if hit and len(name) < len(msgspec.json.encode(best.workload)):
            best = Found(number=found.number, workload=workload, outcome=outcome)
            if tell is not None:
                tell(f"still red with {_operations(best)} ({len(seen)} sequences tried)")
        return hit

    try:
        smallest = _find(explorer.capabilities, seed, found.number, wanted)
    except Flaky:
        return best  # the same sequence is not always red: the shortest that was
    if smallest is None:
        raise HarnessError(
            "the sequence that was red is not drawn again", next_step="search with another --seed, and report this"
        )
    return Found(number=found.number, workload=smallest, outcome=seen[msgspec.json.encode(smallest)])


def explore(explorer: Explorer, request: Request, tell: Tell) -> Search:
    """Search, and shrink what is found. Raises UsageError for a fault that is not seeded in the stack, or without Hypothesis."""
    fault = None if request.fault is None else seeded(explorer.target, request.fault)
    drawn = sequences(explorer.capabilities, request.examples, request.seed)
    result = search(explorer, drawn, fault, _every(request.examples, tell))
    if result.found is None:
        return result
    reds = ", ".join(sorted(result.found.outcome.families))
    tell(
        f"sequence {result.found.number} of {len(result.found.workload.operations)} operations is red: {reds}; shrinking"
    )
    found = shrink(explorer, result.found, seed=request.seed, fault=fault, tell=tell)
    return msgspec.structs.replace(result, found=found)


def _every(count: int, tell: Tell) -> Told:
    """Ten lines a search."""
    step = max(1, count // 10)

    def driven(number: int, judged: int) -> None:
        if number % step == 0:
            tell(f"{number} of {count} sequences green, {judged} verdicts")

    return driven


def seeded(target: Target, fault: str) -> Fault:
    """The fault of that id. Raises UsageError, naming close ones."""
    faults = target.seeded()
    if fault not in faults:
        close = difflib.get_close_matches(fault, faults, cutoff=0.4) or sorted(faults)[:3]
        raise UsageError(
            f"{target.name} has no seeded fault {fault!r}",
            next_step=f"did you mean {' or '.join(close)}? docs/proving.md says where they are",
        )
    return faults[fault]


def told(request: Request, result: Search) -> str:
    """What the search came to, in words."""
    about = f"{request.stack} {f'under {request.fault}' if request.fault else 'as it is'}"
    driven = f"{result.sequences} sequence{'s' * (result.sequences != 1)}, {result.judged} verdicts"
    if result.found is None:
        never = "" if request.fault is None or result.fired else "; the fault never took effect"
        return f"{about}: nothing found in {driven}{never}"
    found = result.found
    lines = [
        f"{about}: found in sequence {found.number}, shrunk to {len(found.workload.operations)} operations ({driven})"
    ]
    lines += [f"  {verdict.check}: {verdict.status}: {verdict.reason}" for verdict in found.outcome.findings]
    return "\n".join([*lines, f"  again: {request.command}"])


def _operations(found: Found) -> str:
    count = len(found.workload.operations)
    return f"{count} operation{'s' * (count != 1)}"


def as_scenario(found: Found, capabilities: Collection[Capability], request: Request) -> str:
    """The sequence as the text of a scenario file, with the checks that turned red."""
    first = found.outcome.findings[0]
    return workloads.as_scenario(
        found.workload,
        capabilities,
        red={verdict.check for verdict in found.outcome.findings},
        promise=f"what a search found red: {first.reason}",
        source=f"{first.source or 'Say here where the promise is written'}. Found by `{request.command}`.",
    )
