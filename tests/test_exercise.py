"""Capabilities that no request names show in the results."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.cancellation import CANCELLATION
from harness.checks.liveness import ALL_COMPLETE
from harness.contract.capability import Capability
from harness.contract.messages import REQUEST_CAP
from harness.contract.topology import Topology
from harness.judging.exercise import due, exercised
from harness.suite.scenario import Scenario
from tests import traces


def interrupted(mode: str, *, reason: str = "length", ended_ns: int = 100) -> list:
    answer = traces.generate([[5, 6]], [[1, 2]], stop_reasons=[reason], started_ns=10, ended_ns=ended_ns)
    return [answer, traces.call("pause", {"mode": mode}, started_ns=50, ended_ns=60)]


@pytest.mark.parametrize(
    ("reason", "shown"), [("abort", Capability.PARTIAL_ANSWERS), ("length", Capability.RETRY_ABORTED)]
)
def test_the_reason_of_an_interrupted_answer_says_what_it_exercised(reason, shown):
    about = {"capabilities": [Capability.PARTIAL_ANSWERS, Capability.RETRY_ABORTED]}
    assert exercised(traces.trace(*interrupted("abort", reason=reason), **about)) == {shown, Capability.PAUSE_ABORT}
    assert exercised(traces.trace(*interrupted("abort", ended_ns=40), **about)) == {Capability.PAUSE_ABORT}
    assert exercised(traces.trace(*interrupted("keep"), **about)) == {Capability.PAUSE_KEEP}


def test_routed_experts_are_exercised_where_some_came():
    answer = traces.generate([[5]], [[1]], experts=[[[[0, 1]]]])
    assert exercised(traces.trace(answer)) == {Capability.ROUTED_EXPERTS}
    assert exercised(traces.trace(traces.generate([[5]], [[1]], experts=[None]))) == set()


def test_quantization_is_exercised_by_answers_in_a_quantized_topology():
    quantized = Topology(quantization="int8")
    assert exercised(traces.trace(traces.generate([[5]], [[1]]), topology=quantized)) == {Capability.QUANTIZED}
    assert exercised(traces.trace(topology=quantized)) == set()


def test_a_quantized_sync_is_exercised_by_a_sync_and_an_answer():
    calls = [traces.generate([[5]], [[1]]), traces.call("sync_weights", {"version": 1, "chunks": 1})]
    both = {Capability.WEIGHT_SYNC, Capability.QUANTIZED, Capability.QUANTIZED_SYNC}
    assert exercised(traces.trace(*calls, topology=Topology(quantization="fp8"), capabilities=[*both])) == both
    assert exercised(traces.trace(*calls, capabilities=[*both])) == {Capability.WEIGHT_SYNC}


@pytest.mark.parametrize(("together", "shown"), [(True, {Capability.REQUEST_CAP}), (False, set())])
def test_the_cap_is_exercised_by_more_requests_than_it_allows_at_once(together, shown):
    rows = [[n] for n in range(REQUEST_CAP)]
    second = 50 if together else 100
    calls = [
        traces.generate(rows, [[1]] * len(rows), started_ns=start, ended_ns=start + 90) for start in (0, second, second)
    ]
    assert exercised(traces.trace(*calls, capabilities=[Capability.REQUEST_CAP])) == shown


@pytest.mark.parametrize(("transport", "shown"), [("ipc", {Capability.CUDA_IPC}), ("broadcast", set())])
def test_cuda_ipc_is_exercised_where_a_worker_says_so(transport, shown):
    workers = traces.call("workers", {}, {"servers": {"server-0": [{"rank": 0, "transport": transport}]}})
    assert exercised(traces.trace(workers)) == shown


def test_an_adapter_in_a_request_exercises_lora():
    answer = traces.generate([[5]], [[1]], lora_adapter="a")
    assert exercised(traces.trace(answer)) == {Capability.LORA}


def test_answers_under_names_exercise_naming_them():
    load = traces.call("load_lora_adapter", {"name": "a", "version": 1}, {}, started_ns=1, ended_ns=2)

    def under(name: str | None):
        return traces.generate([[5]], [[1]], lora_adapter=name, started_ns=3, ended_ns=4)

    assert exercised(traces.trace(under(None), under("a"))) == {Capability.LORA}
    named = {Capability.ADAPTER_SYNC, Capability.LORA, Capability.NAMED_MODELS}
    assert exercised(traces.trace(load, under(None), under("a"))) == {*named, Capability.ADAPTER_BY_NAME}
    assert exercised(traces.trace(load, under("a"), under("b"))) == {*named, Capability.SEVERAL_ADAPTERS}


def needing(wave: int, *needs: Capability, spoils: bool = False) -> Scenario:
    return Scenario(
        name=f"area.test_{wave}",
        wave=wave,
        task=0,
        promise="",
        needs=frozenset(needs),
        checks=(ALL_COMPLETE,),
        topologies=("disaggregated",),
        deadline_s=1.0,
        source="",
        spoils=spoils,
    )


def test_a_wave_has_to_exercise_what_it_has_scenarios_for_and_what_no_wave_has():
    scenarios = [
        needing(1, Capability.HEALTH),
        needing(1, Capability.SLEEP, Capability.PARTIAL_ANSWERS),
        needing(2, Capability.SLEEP),
        needing(5, Capability.LORA, Capability.HEALTH),
    ]
    promised = {Capability.HEALTH, Capability.SLEEP, Capability.LORA, Capability.KILL_SERVER}
    assert due(promised, scenarios, [1]) == {Capability.HEALTH, Capability.KILL_SERVER}, (
        "sleep: its scenario here needs more"
    )
    assert due(promised, scenarios, [2]) == {Capability.SLEEP, Capability.KILL_SERVER}
    assert due(promised, scenarios, [1, 2, 5]) == promised
    leaves = msgspec.structs.replace(needing(1, Capability.HTTP_STREAMING), checks=(CANCELLATION,))
    reads = needing(3, Capability.HTTP_STREAMING)
    streams = promised | {Capability.HTTP_STREAMING}
    assert due(streams, [*scenarios, leaves, reads], [1, 2, 5]) == promised, (
        "a stream whose reader leaves shows nothing"
    )
    assert due(streams, [*scenarios, leaves, reads], [1, 2, 3, 5]) == streams
    spoiling = needing(1, Capability.KILL_SERVER, spoils=True)
    assert due(promised, [*scenarios, spoiling], [1, 2, 5]) == promised - {Capability.KILL_SERVER}, (
        "left out by default"
    )


def test_what_an_abort_met_says_which_retries_were_exercised():
    declared = [Capability.RETRY_ABORTED_BATCH, Capability.RETRY_ABORTED_CHAT, Capability.PAUSE_ABORT]
    pause = traces.call("pause", {"mode": "abort"}, started_ns=50, ended_ns=60)
    batch = traces.generate([[5], [6]], [[1], [2]], started_ns=10, ended_ns=100)
    chat = traces.call("chat_completion", {"body": {}}, started_ns=10, ended_ns=100)
    assert Capability.RETRY_ABORTED_BATCH in exercised(traces.trace(batch, pause, capabilities=declared))
    assert Capability.RETRY_ABORTED_CHAT in exercised(traces.trace(chat, pause, capabilities=declared))
    assert exercised(traces.trace(*interrupted("abort"), capabilities=declared)) == {Capability.PAUSE_ABORT}


def test_a_configured_address_is_exercised_by_asking_it_also_without_an_answer():
    def asked(**extra):
        request = {"method": "GET", "path": "/v1/models", **extra}
        return exercised(traces.trace(traces.call("http", request, error=traces.error("ConnectError"))))

    assert asked(configured=True) == {Capability.CONFIGURED_ADDRESS}
    assert asked() == set()


@pytest.mark.parametrize(("groups", "shown"), [([{"rows": []}], {Capability.GYM_GENERATOR}), ([], set())])
def test_a_trainer_that_got_rollouts_exercised_the_generator_of_trajectories(groups, shown):
    wants = traces.call("trainer_wants", {"within_s": 1.0}, result={"what": "training", "groups": groups})
    assert exercised(traces.trace(wants)) - {Capability.TRAINER_RUNS} == shown


@pytest.mark.parametrize(("another", "shown"), [(True, {Capability.SERVER_ADDRESSES}), (False, set())])
def test_a_client_of_another_model_than_the_servers_have_needs_their_addresses(another, shown):
    life = traces.call("client_life", {"life": "as configured", "another_model": another})
    assert exercised(traces.trace(life)) - {Capability.CLIENT_LIVES} == shown
