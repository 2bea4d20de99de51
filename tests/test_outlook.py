"""A run's forecast before it begins: starts, minutes, memory, and topologies that do not fit on this machine."""

from __future__ import annotations

import pytest

from harness.contract.errors import UsageError
from harness.contract.runtime import GIB
from harness.contract.topology import COLOCATED, DISAGGREGATED, Placement, in_order, names, topology
from harness.machine import outlook
from harness.machine.outlook import Start
from harness.running.catalogue import declared


def start(name="disaggregated", **about):
    given = {"target": "t", "topology": topology(name), "scenarios": 10, "takes": 1, "kind": "ray", **about}
    return Start(**given)


def test_more_workers_need_more_memory_and_more_time():
    assert start("tp2x2").bytes > start("tp2").bytes
    assert start("tp2x2").seconds > start("tp2").seconds
    assert start(kind="fork").seconds < start().seconds
    assert start(kind="inline").bytes == 0


def test_every_death_but_the_last_costs_a_start():
    once, thrice = start(spoiling=1), start(spoiling=3)
    assert thrice.seconds > 2.5 * once.seconds
    assert "2 more starts after scenarios that spoil the stack" in "\n".join(outlook.lines([thrice], "cpu", 0))
    assert "more starts" not in "\n".join(outlook.lines([once], "cpu", 0))
    assert start(spoiling=2, takes=2).seconds < start(spoiling=2).seconds * 2


def test_what_the_machine_cannot_hold_is_named(monkeypatch):
    monkeypatch.setattr(outlook, "available_and_total", lambda: (4 * GIB, 8 * GIB))
    said = "\n".join(outlook.lines([start(), start("tp2x2")], "cpu", 0))
    assert "2 starts, about" in said
    assert "t@tp2x2: 2 engines of 2 workers, 10 scenarios, 6.5 GiB" in said
    assert said.count("this machine cannot hold it: needs") == 2
    monkeypatch.setattr(outlook, "available_and_total", lambda: (64 * GIB, 64 * GIB))
    assert "cannot hold" not in "\n".join(outlook.lines([start(), start("tp2x2")], "cpu", 0))


@pytest.mark.parametrize(("name", "needed"), [("disaggregated", 3), ("colocated", 1), ("tp2x2", 4), ("tp2", 3)])
def test_gpus_that_are_needed_and_not_there(name, needed):
    assert start(name).lacks("cuda", needed - 1) == f"needs {needed} GPUs, there are {needed - 1}"
    assert start(name).lacks("cuda", needed) == ""


def test_an_unknown_topology_is_a_named_error():
    with pytest.raises(UsageError, match="did you mean colocated"):
        topology("colocate")


def test_the_table_says_how_many_engines_or_leaves_it_open():
    assert topology("disaggregated", 4).engines == 4
    assert topology("tp2", 4).engines == 1
    assert in_order(["tp2", "colocated", "disaggregated"]) == ["disaggregated", "colocated", "tp2"]
    assert all(topology(name).about for name in names())


def test_colocated_engines_take_the_place_of_disaggregated_ones():
    scenarios = declared().values()
    for scenario in scenarios:
        places = {place.name: place for place in scenario.driven_in(2, colocate=True)}
        moved = {COLOCATED if name == DISAGGREGATED else name for name in scenario.topologies}
        assert set(places) == (set(scenario.topologies) if scenario.fixed_placement else moved)
    (lora,) = next(s for s in scenarios if s.topologies == ("lora",)).driven_in(2, colocate=True)
    assert (lora.name, lora.placement, lora.lora) == ("lora", Placement.COLOCATED, True)
    assert any(s.fixed_placement for s in scenarios)
