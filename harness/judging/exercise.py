"""Which declared capabilities a run exercised. A declared one that no call exercised is red. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from http import HTTPStatus
from typing import Any

from harness.checks.cancellation import CANCELLATION
from harness.contract.capability import Capability
from harness.contract.errors import Blame
from harness.contract.messages import REQUEST_CAP, capabilities_of
from harness.judging.judge import NEXT_STEP
from harness.records.recording import Call, ScenarioTrace, most_at_once
from harness.records.verdict import Conformance, Verdict
from harness.suite.scenario import Scenario

CHECK = "capability.exercised"
_NO_PROOF: dict[str, frozenset[Capability]] = {
    "wake_up": frozenset({Capability.SLEEP}),
    "prepare_weight_sync": frozenset({Capability.WEIGHT_SYNC}),
}
"""Call → capabilities that it does not prove: waking up does not show that sleep was exercised."""


def exercised(trace: ScenarioTrace) -> set[Capability]:
    """The capabilities that the scenario's own calls exercised with success; an asked configured address, also without an answer."""
    own = [call for call in trace.own_calls if call.error is None and not _refused(call)]
    found = {
        capability
        for call in own
        for capability in capabilities_of(call.method, call.request) - _NO_PROOF.get(call.method, frozenset())
    }
    # Whether anybody listens there is the question.
    asked = any(call.request.get("configured") for call in trace.own_calls)
    return found | _of_answers(trace, own) | ({Capability.CONFIGURED_ADDRESS} if asked else set())


def _refused(call: Call) -> bool:
    """True for a request that an address answered with an error."""
    return call.method == "http" and (call.result or {}).get("status", 0) >= HTTPStatus.BAD_REQUEST


def _of_answers(trace: ScenarioTrace, own: list[Call]) -> set[Capability]:
    """Capabilities that no request names; results and their times show them."""
    answered = [call for call in own if call.method == "generate" and (call.result or {}).get("response_ids")]
    aborts = [call for call in own if call.method == "pause" and call.request.get("mode") == "abort"]
    found: set[Capability] = set()
    promised = set(trace.header.capabilities)
    met = [c for c in answered if _overlaps(aborts, c)]
    retried = [c for c in met if "abort" not in (c.result or {}).get("stop_reasons", ())]
    if len(retried) < len(met):
        found.add(Capability.PARTIAL_ANSWERS)
    if retried:
        found |= {Capability.RETRY_ABORTED} & promised
    if any(len(c.request.get("prompt_token_ids") or ()) > 1 for c in retried):
        found |= {Capability.RETRY_ABORTED_BATCH} & promised
    if any(_overlaps(aborts, c) for c in own if c.method == "chat_completion"):
        found |= {Capability.RETRY_ABORTED_CHAT} & promised
    if any(any((call.result or {}).get("routed_experts") or ()) for call in answered):
        found.add(Capability.ROUTED_EXPERTS)
    if answered and trace.header.topology.quantization is not None:
        found.add(Capability.QUANTIZED)
        if any(call.method == "sync_weights" for call in own):
            found.add(Capability.QUANTIZED_SYNC)
    if any(call.method == "sync_weights" for call in own):
        found |= {Capability.NATIVE_WEIGHT_SYNC} & promised
        found |= {Capability.DELTA_SYNC} if trace.header.topology.deltas else set()
    if _asked_at_once(own) > REQUEST_CAP * len(trace.header.servers):
        found |= {Capability.REQUEST_CAP} & promised
    if any(call.method == "trainer_wants" and (call.result or {}).get("groups") for call in own):
        found.add(Capability.GYM_GENERATOR)  # its rollouts are trajectories
    breaks = [call.request.get("fault") or {} for call in own if call.method == "break_hop"]
    if any(fault.get("hop") == "router" for fault in breaks):
        found |= {Capability.BROKEN_ROUTER_HOP} & promised
    if any(worker["transport"] == "ipc" for worker in _workers(own)):
        found.add(Capability.CUDA_IPC)
    return found | _of_adapters(own, answered, promised)


def _asked_at_once(own: list[Call]) -> int:
    """Most rows of generate() that were asked for and not yet answered at any time."""
    generates = [call for call in own if call.method == "generate"]
    return most_at_once(
        (call.started_ns, call.ended_ns) for call in generates for _ in call.request.get("prompt_token_ids") or ()
    )


def _workers(own: list[Call]) -> Iterable[dict[str, Any]]:
    """What each worker says of itself, in every answer of workers()."""
    said = [call.result["servers"] for call in own if call.method == "workers" and call.result is not None]
    return (worker for servers in said for workers in servers.values() for worker in workers)


def _of_adapters(own: list[Call], answered: list[Call], promised: AbstractSet[Capability]) -> set[Capability]:
    """Capabilities that show in answers without an adapter while one is loaded, and in answers under several."""
    loads = [call for call in own if call.method == "load_lora_adapter"]
    names = {call.request.get("lora_adapter") for call in answered if any(c.ended_ns <= call.started_ns for c in loads)}
    found = {Capability.ADAPTER_BY_NAME} & promised if None in names and len(names) > 1 else set()
    found |= {Capability.SEVERAL_ADAPTERS} if len(names - {None}) > 1 else set()
    return found | ({Capability.NAMED_MODELS} & promised if len(names) > 1 else set())


def _overlaps(pauses: Iterable[Call], call: Call) -> bool:
    """True if one of these pauses came while the call was pending."""
    return any(call.started_ns < pause.started_ns < call.ended_ns for pause in pauses)


def due(
    promised: AbstractSet[Capability], scenarios: Iterable[Scenario], whole_waves: Iterable[int]
) -> set[Capability]:
    """The promised capabilities that these waves had to exercise: all except those whose scenarios are all in other waves, or
    left out by default, or end before an answer since their callers go away."""
    waves = set(whole_waves)
    here: set[Capability] = set()
    elsewhere: set[Capability] = set()
    for scenario in scenarios:
        if scenario.needs <= promised:
            usual = scenario.wave in waves and any(map(scenario.by_default, scenario.topologies))
            answered = CANCELLATION not in scenario.checks
            (here if usual and answered else elsewhere).update(scenario.needs)
    return {capability for capability in promised if capability in here or capability not in elsewhere}


def unexercised(
    target: str, topology: str, wave: int, declared: Iterable[Capability], seen: Iterable[Capability]
) -> list[Verdict]:
    """A red verdict for each declared capability that was not seen. Valid only for a wave that ran unfiltered."""
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
            fault="a capability is declared and never tried, and the report looks as if it worked",
            source="architecture, rule 8",
            next_step=NEXT_STEP[Blame.HARNESS],
        )
        for capability in sorted(set(declared) - set(seen))
    ]
