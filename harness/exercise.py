"""Which declared abilities a run really exercised. One that nothing exercised was promised, not seen: red. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from harness.capability import Capability
from harness.contract import capabilities_of
from harness.errors import Blame
from harness.judge import NEXT_STEP
from harness.recording import ScenarioTrace
from harness.verdict import Conformance, Verdict

CHECK = "capability.exercised"
_NO_PROOF: dict[str, frozenset[Capability]] = {
    "resume": frozenset({Capability.PAUSE_KEEP}),
    "wake_up": frozenset({Capability.SLEEP}),
    "prepare_weight_sync": frozenset({Capability.WEIGHT_SYNC}),
}
"""Calls that go along with others: a resume does not show that pause(keep) was exercised."""


def exercised(trace: ScenarioTrace) -> set[Capability]:
    """The capabilities that the scenario's own calls exercised with success."""
    return {
        capability
        for call in trace.calls
        if call.phase == "scenario" and call.error is None
        for capability in capabilities_of(call.method, call.request) - _NO_PROOF.get(call.method, frozenset())
    }


def unexercised(
    target: str, topology: str, wave: int, declared: Iterable[Capability], seen: Iterable[Capability]
) -> list[Verdict]:
    """A red verdict for each declared capability that was not seen. Only fit for a wave that was run unfiltered."""
    return [
        Verdict(
            scenario=f"capabilities.{capability}",
            wave=wave,
            task=0,
            promise=f"the declared capability {capability!r} is exercised",
            topology=topology,
            check=CHECK,
            target=target,
            status=Conformance.UNTESTABLE,
            blame=Blame.HARNESS,
            reason=f"{capability} is declared and no call of the run exercised it with success",
            fault="an ability is declared, never tried, and the report looks as if it worked",
            source="architecture, rule 8",
            next_step=NEXT_STEP[Blame.HARNESS],
        )
        for capability in sorted(set(declared) - set(seen))
    ]
