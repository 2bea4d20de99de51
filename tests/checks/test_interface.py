"""The documented interface: every way in which a client may leave it is red, and what it adds is not."""

import asyncio
import inspect

import msgspec
import pytest

from backends.miniature.client import Client
from backends.miniature.faults import FAULTS, interface
from backends.miniature.interface import Interface
from harness.checks.interface import DOCUMENTED_INTERFACE
from harness.driving import census
from tests.checks.scene import Scene


def judged(client):
    scene = Scene()
    scene.call("census", {}, msgspec.to_builtins(census.of(client, types={})))
    return scene.judge(DOCUMENTED_INTERFACE)


def test_the_correct_client_passes_and_may_offer_more():
    found = judged(Interface(Client()))
    assert (found.status, found.facts) == ("pass", 28)


def test_without_a_census_nothing_is_known():
    assert Scene().judge(DOCUMENTED_INTERFACE).status == "untestable"


REASONS = {
    interface.MethodGone: "the client has no method dp_size()",
    interface.OtherDefault: "sample() has the default 0 for session_id, and None is documented",
    interface.AsyncInsteadOfSync: "tp_size() is async and documented as sync",
    interface.ParameterGone: "init_weight_update_communicator() has no parameter init_info",
    interface.OneMoreArgument: "pause_generation() cannot be called as documented: it needs clear_cache",
}


@pytest.mark.parametrize("broken", REASONS)
def test_each_seeded_fault_is_red(broken):
    found = judged(broken(Client()))
    assert found.status == "fail"
    assert found.reason.startswith(REASONS[broken])


def test_an_argument_of_another_name_is_gone_and_new():
    assert judged(interface.ParameterRenamed(Client())).reasons == [
        "chat_completion() cannot be called as documented: it needs payload",
        "chat_completion() has no parameter request_payload",
    ]


def test_every_fault_of_the_interface_has_its_test_here():
    seeded = [fault for fault in FAULTS if fault.name == "interface_changed"]
    assert len(seeded) == len(REASONS) + 1
    assert all(fault.changes >= {"Interface._census"} for fault in seeded)


class Async(Interface):
    async def extra(self):
        await asyncio.sleep(0)


def test_a_coroutine_that_is_wrapped_is_still_one():
    assert inspect.iscoroutinefunction(Async.extra)
    assert judged(Async(Client())).status == "pass"
