"""The remote placement's ports: if another process holds a port that the user named, the error names that process."""

import os
import socket

import msgspec
import pytest

from backends.skyrl.remote import PortTaken, RemoteServers
from harness.contract.errors import Blame, StartFailed
from harness.contract.messages import StartRequest
from harness.contract.topology import Placement, Topology
from harness.driving.host import reply_to
from harness.driving.process import as_stack_error


def servers(tmp_path, base_port):
    request = StartRequest(
        target="skyrl-0.2.0:http",
        topology=Topology(engines=2, placement=Placement.REMOTE),
        model_path=str(tmp_path),
        scratch=str(tmp_path),
        logs=str(tmp_path),
        base_port=base_port,
    )
    return RemoteServers(request, on_cpu=True)


@pytest.mark.asyncio
async def test_a_port_that_is_taken_is_named_before_anything_starts(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port} is taken by .*\(pid {os.getpid()}\)") as caught:
            await servers(tmp_path, port).start()
    assert caught.value.blame == Blame.ENVIRONMENT
    assert "--base-port" in caught.value.next_step
    assert not list(tmp_path.glob("server-*.log")), "no server was started"


@pytest.mark.parametrize("graphs", [False, True])
def test_servers_are_eager_unless_the_run_asks_for_graphs(tmp_path, graphs):
    one = servers(tmp_path, None)
    one._request = msgspec.structs.replace(one._request, cuda_graphs=graphs)
    assert ("--enforce-eager" in one._command(8000)) is not graphs


def test_without_a_base_port_the_system_chooses_free_ones(tmp_path):
    chosen = servers(tmp_path, None)
    assert len({chosen._port(0), chosen._port(1)}) == 2


def test_blame_and_next_step_of_the_adapters_own_error_reach_the_driver(tmp_path):
    reply = reply_to(PortTaken("port 8000 is taken", next_step="free it"), "")
    assert (reply.error, reply.kind) == ("StartFailed", "PortTaken")
    error = as_stack_error(reply, tmp_path / "host.log")
    assert type(error) is StartFailed
    assert (error.message, error.next_step, error.blame) == ("port 8000 is taken", "free it", Blame.ENVIRONMENT)
    assert StartFailed("of another start").blame == Blame.STACK
