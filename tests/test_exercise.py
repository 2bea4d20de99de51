"""Capabilities that no request names: they show in what came back."""

from __future__ import annotations

import pytest

from harness.capability import Capability
from harness.exercise import exercised
from harness.topology import Topology
from tests import traces


def interrupted(mode: str, *, ended_ns: int = 100) -> list:
    answer = traces.generate([[5, 6]], [[1, 2]], started_ns=10, ended_ns=ended_ns)
    return [answer, traces.call("pause", {"mode": mode}, started_ns=50, ended_ns=60)]


@pytest.mark.parametrize("declared", [Capability.PARTIAL_ANSWERS, Capability.RETRY_ABORTED])
def test_an_interrupted_answer_exercises_the_one_that_is_declared(declared):
    about = {"capabilities": [declared, Capability.PAUSE_ABORT]}
    assert exercised(traces.trace(*interrupted("abort"), **about)) == {declared, Capability.PAUSE_ABORT}
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


def test_an_adapter_in_a_request_exercises_lora():
    answer = traces.generate([[5]], [[1]], lora_adapter="a")
    assert exercised(traces.trace(answer)) == {Capability.LORA}
