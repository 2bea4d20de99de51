"""Made-up faults and verdicts, a kill matrix of realistic size, and a scripted session."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from harness.contract.capability import Capability
from harness.contract.errors import Blame
from harness.contract.faults import NOTHING, Fact, Fault
from harness.machine.targets import Target
from harness.proving.kill_matrix import KillMatrix, Lap, prove_target
from harness.proving.prove import Plan
from harness.records.verdict import Cause, Verdict
from harness.running import catalogue
from harness.running.session import Seat
from tests import recordings

TARGET = "toy"
READS = {"tokens": Fact.TEXT | Fact.ANSWERS, "routing": Fact.ROUTES}
"""Check → the facts that it reads."""
FAULTS = (
    Fault(
        name="swapped",
        variant="one_server",
        breaks="results of two servers are swapped",
        caught_by=frozenset({"ordering"}),
        corrupts=Fact.TEXT,
    ),
    Fault(name="swapped", variant="always", breaks="all results are swapped", caught_by=frozenset({"ordering"})),
    Fault(name="moves", breaks="a session moves", caught_by=frozenset({"routing"})),
)


def target(name: str = TARGET, *, inline: bool = True, faults: str = "tests.kill_matrices:FAULTS") -> Target:
    """A target with all capabilities and the faults `FAULTS`."""
    return Target(
        name=name, about="made up", adapter="none", inline=inline, faults=faults, capabilities=frozenset(Capability)
    )


def verdict(scenario: str, check: str, status: str = "pass", reason: str = "", **fields: Any) -> Verdict:
    """One verdict; a red one blames the stack."""
    red = status in ("fail", "untestable")
    about: dict[str, Any] = {"target": TARGET, "fault": f"what {check} is for", "reason": reason}
    if red:
        about |= {"reason": reason or f"{check} is wrong", "blame": Blame.STACK}
        about["evidence"] = [{"expected": [1, 2], "actual": [2, 1]}, {"row": 1}, {"row": 2}]
    return recordings.verdict(scenario=scenario, check=check, status=status, **(about | fields))


class Script:
    """A session that returns the verdicts of `says` for each fault and scenario."""

    def __init__(
        self,
        says: Callable[[str | None, str], Iterable[Verdict]],
        fired: Mapping[str, int] | None = None,
        refuses: Mapping[str, Exception] | None = None,
    ) -> None:
        self._says, self._fired, self._refuses = says, fired or {}, refuses or {}
        self._fault: str | None = None
        self.calls: list[tuple[str, ...]] = []
        self.closed: list[str] = []

    def begin(self, *_: object) -> Script:
        return self

    def inject(self, seat: Seat, fault: Fault | None) -> int:
        before, self._fault = self._fault, None if fault is None else fault.id
        self.calls.append(("inject", seat.name, self._fault or "none"))
        if fault is not None and fault.id in self._refuses:
            raise self._refuses[fault.id]
        return 0 if before is None else self._fired.get(before, 1)

    def driven(self, scenario: Any, seat: Seat) -> list[Any]:
        return []

    def drive(self, scenario: Any, seat: Seat, body: Any) -> list[Verdict]:
        assert callable(body)
        self.calls.append(("drive", seat.name, scenario.name))
        return list(self._says(self._fault, scenario.name))

    def close(self, outcome: str = "completed") -> None:
        self.closed.append(outcome)


def planned(
    scenarios: Iterable[str],
    faults: Iterable[Fault] = FAULTS,
    *,
    inline: bool = True,
    brief: Iterable[str] = (),
) -> Plan:
    """A plan of some declared scenarios in one topology."""
    names = tuple(scenarios)
    topology = catalogue.declared()[names[0]].driven_in(2, ["disaggregated"])[0]
    return Plan(
        target=TARGET,
        inline=inline,
        faults=tuple(faults),
        seats=((Seat(target=TARGET, topology=topology), names),),
        unable=(),
        whole=True,
        brief=frozenset(brief),
    )


def big(faults: int = 70, checks: int = 45, scenarios: int = 120, *, green: bool = False) -> KillMatrix:
    """A deterministic matrix of realistic size and names; unless `green`, it contains every kind of trouble."""
    draw = random.Random(7)
    families = _families(checks)
    names = [f"{m}.test_{w}_{n}" for n, (m, w) in enumerate(_names(draw, scenarios))]
    base = {name: sorted(draw.sample(families, 4)) for name in names}
    control = [verdict(s, c) for s, cs in base.items() for c in [*cs, "echo", "conservation", "instruments", "numbers"]]
    control += [verdict(s, c) for s, c in zip(names, families, strict=False) if c not in base[s]]
    every = [*families, "echo", "conservation", "instruments", "numbers"]
    seeded = [_fault(draw, n, every) for n in range(max(faults, len(every)))]
    laps: dict[str | None, Lap] = {None: Lap(fault=None, verdicts=control, driven=len(names))}
    for fault in seeded:
        reds = [
            verdict(s, c, "fail" if c != "instruments" else "untestable", f"{c}: answers of servers 0 and 1 differ")
            for c in sorted(fault.caught_by | ({"echo", "conservation"} if fault.corrupts else set()))
            for s in sorted(s for s in names if c in base[s] or draw.random() < 0.04)[: draw.randint(1, 14)]
            or names[:1]
        ]
        laps[fault.id] = Lap(
            fault=fault.id, verdicts=reds, driven=len(names), fired=draw.randint(1, 900), seconds=draw.random() * 3
        )
    if not green:
        _spoil(seeded, laps, names)
    proof = prove_target(
        "miniature",
        seeded,
        laps,
        reads={"echo": Fact.ANSWERS, "conservation": Fact.ANSWERS},
        plan={f.id: names for f in seeded},
        scenarios=names,
        unable=["abort.test_retried_by_the_client"],
        whole=True,
        filtered=False,
        commands={f.id: f"parity prove --stack miniature --fault {f.id}" for f in seeded},
    )
    return KillMatrix(
        run_id="20261121T180000Z-abcdef",
        created_at="2026-11-21T18:00:00+00:00",
        command="parity prove",
        start="fork",
        engine="cpu",
        proofs=[proof],
        seconds=141.5,
    )


def _families(number: int) -> list[str]:
    subjects = ["tokens", "logprobs", "routing", "weights", "pause", "openai", "sampling", "text", "staleness", "lora"]
    words = ["greedy", "reference", "sticky", "same_output", "idempotent", "in_flight", "distribution"]
    return [f"{subjects[n % 10]}.{words[(n * 3 + n // 10) % 7]}" for n in range(number)]


def _names(draw: random.Random, number: int) -> list[tuple[str, str]]:
    modules = ["ordering", "routing", "pausing", "weights", "openai", "sampling", "messages", "control_plane", "sleep"]
    words = ["results_keep_the_order_of_prompts", "under_load", "many_sessions_spread", "same_version_moves_nothing"]
    return sorted((draw.choice(modules), draw.choice(words)) for _ in range(number))


def _fault(draw: random.Random, number: int, every: list[str]) -> Fault:
    names = ["results_swapped", "session_moves", "tokens_lost_on_continuation", "stale_prefix_cache", "sync_missed"]
    return Fault(
        name=names[number % 5],
        variant=f"{draw.choice(['one_server', 'always', 'under_load', 'second_time'])}_{number}",
        breaks="the second server of two answers with what belongs to the first, when both are busy",
        caught_by=frozenset({every[number % len(every)]}),
        corrupts=draw.choice([NOTHING, Fact.ANSWERS]),
    )


def _spoil(seeded: list[Fault], laps: dict[str | None, Lap], names: list[str]) -> None:
    """One fault of each kind of trouble."""
    survived, missed, overreach, unfired, incomplete, blind, broke = (f.id for f in seeded[3:24:3])
    replace = msgspec.structs.replace
    laps[survived] = replace(laps[survived], verdicts=[])
    laps[missed] = replace(laps[missed], verdicts=[verdict(names[0], "numbers", "fail", "log-probability above 0")])
    laps[overreach] = replace(
        laps[overreach], verdicts=[*laps[overreach].verdicts, *(verdict(n, "echo", "fail") for n in names[:9])]
    )
    laps[unfired] = replace(laps[unfired], fired=0)
    del laps[incomplete]
    laps[blind] = replace(
        laps[blind], verdicts=[*laps[blind].verdicts, *(verdict(n, "conservation", "untestable") for n in names[4:40])]
    )
    broken = verdict(names[5], "numbers", "untestable", "check numbers raised KeyError", cause=Cause.RAISED)
    laps[broke] = replace(laps[broke], verdicts=[*laps[broke].verdicts, broken])
