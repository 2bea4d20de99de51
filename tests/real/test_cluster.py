"""A matrix on a Ray cluster of one node. Its cells drive the miniature: what is real here is the cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import PROJECT
from harness.contract.errors import UsageError
from harness.machine import environments, ports
from harness.machine.processes import kill_trees
from harness.machine.progress import silent
from harness.running import child, cluster
from harness.running.cluster import Cluster, Task
from harness.running.matrix import MatrixFolder, Outcome, drive_on, plan
from tests.leftovers import IN_BACKGROUND
from tests.test_matrix import SELECTED

pytestmark = pytest.mark.real
CELLS = 2


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node with two cores, in which a script's background ignores SIGINT."""
    home = environments.ensure("skyrl-0.4.0", "cpu", root=PROJECT, progress=silent)
    port, place = ports.apart(), tmp_path_factory.mktemp("ray")
    command = [
        *(home.parent / "ray", "start", "--head", "--block", "--port", port, "--num-cpus", 2, "--temp-dir", place),
        *("--include-dashboard=false", "--disable-usage-stats", "--node-ip-address", "127.0.0.1"),
    ]
    with subprocess.Popen(
        [*IN_BACKGROUND, *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as head:
        try:
            yield Cluster(address=f"127.0.0.1:{port}", python=home, engine="cpu")
        finally:
            kill_trees([head.pid])


def task(folder: Path, name: str, script: str, **resources: int) -> Task:
    command = [sys.executable, "-c", script]
    needs = {"cpus": 2, "gpus": 0} | resources
    return Task(name=name, command=command, folder=folder, log=folder / f"{name}.log", **needs)


@pytest.fixture(scope="module")
def reached(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    folder = tmp_path_factory.mktemp("reached")
    ends = time.monotonic() + 60
    while True:
        try:
            list(nodes.run([task(folder, "first", "pass")], folder / "log"))
        except UsageError:
            assert time.monotonic() < ends
        else:
            return nodes


def test_cells_are_tasks_with_their_resources_and_end_as_on_one_machine(reached, tmp_path):
    orders = plan(["miniature"], ["disaggregated", "remote"], [1], SELECTED, arguments=["-k", SELECTED])
    folder, outcomes = MatrixFolder(tmp_path / "matrix"), list[Outcome]()
    with folder.held():
        folder.extend(orders)
        drive_on(reached, folder, orders, child.COMMAND, progress=silent, told=outcomes.append)
    assert [(one.exit_status, one.failed) for one in outcomes] == [(0, "")] * CELLS
    assert folder.to_drive(orders) == []


def test_a_task_that_no_node_can_take_fails_by_name_and_the_others_run(reached, tmp_path):
    tasks = [task(tmp_path, "large", "pass", gpus=1), task(tmp_path, "small", "raise SystemExit(3)")]
    events = {one.name: one for one in reached.run(tasks, tmp_path / "log", waits_s=15) if one.event != "started"}
    assert events["small"].status == 3
    assert events["large"].reason == "no node had 1 GPUs and 2 CPUs for it in 15 s"


def test_ctrl_c_interrupts_what_runs(reached, tmp_path):
    """The command is interrupted once and ends its work; what waits is never begun."""
    script = (
        "import pathlib, signal, time\n"
        "try:\n    print('runs', flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    pathlib.Path('ended').touch()\n"
    )
    tasks = [task(tmp_path, "runs", script), task(tmp_path, "waits", "import pathlib; pathlib.Path('begun').touch()")]
    running = reached.run(tasks, tmp_path / "log")
    assert next(running).event == "started"
    ends = time.monotonic() + 60
    while "runs" not in (tmp_path / "runs.log").read_text():
        assert time.monotonic() < ends
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt())
    assert (tmp_path / "ended").is_file()
    assert not (tmp_path / "begun").exists()
    assert time.monotonic() - began < cluster.CANCEL_S


def test_a_cluster_that_is_not_there_is_named(reached, tmp_path):
    nowhere = Cluster(address=f"127.0.0.1:{ports.apart()}", python=reached.python, engine="cpu")
    with pytest.raises(UsageError, match=r"ran 0 of 1 tasks: ConnectionRefusedError.*") as refused:
        list(nowhere.run([task(tmp_path, "first", "pass")], tmp_path / "log"))
    assert "--ray-python" in refused.value.next_step
