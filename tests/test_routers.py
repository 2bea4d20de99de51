"""Another version of the router is fetched once, comes before the environment's, and a start that fails with it says why."""

from __future__ import annotations

import functools
import hashlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.skyrl.http import HttpStack
from harness.contract.errors import EnvironmentBroken, StartFailed
from harness.machine.progress import silent
from harness.machine.routers import front
from harness.machine.targets import Router
from tests.wheels import wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index on loopback, with one package in two versions."""
    folder = tmp_path / "index" / "some-router"
    folder.mkdir(parents=True)
    built = [wheel(folder, "some-router", version, requires=["not-there"]) for version in ("1.0", "1.1")]
    hashes = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in built}
    links = (f'<a href="{name}#sha256={digest}">{name}</a>' for name, digest in hashes.items())
    (folder / "index.html").write_text("<!DOCTYPE html><html><body>" + "".join(links) + "</body></html>")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("UV_INDEX", "UV_FIND_LINKS", "UV_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield folder
        server.shutdown()


def test_a_version_is_fetched_once_without_its_dependencies_and_comes_first(tmp_path: Path, index: Path):
    router = Router(package="some-router", version="1.1")
    [folder] = front(router, tmp_path, Path(sys.executable), silent)
    for one in index.iterdir():
        one.unlink()
    assert front(router, tmp_path, Path(sys.executable), silent) == [folder], "the second time without an index"
    code = "import some_router, importlib.metadata as m; print(some_router.VERSION, m.version('some-router'))"
    said = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["1.1", "1.1"]
    assert "--hash=sha256:" in (folder.parent / "router.txt").read_text()


def test_the_environments_own_version_needs_no_folder(tmp_path: Path):
    for router in (None, Router(package="some-router", policy="random")):
        assert front(router, tmp_path, Path("/nowhere"), silent) == []
    assert not list(tmp_path.iterdir())


def test_a_version_that_the_index_does_not_have_is_named_and_leaves_nothing(tmp_path: Path, index: Path):
    with pytest.raises(EnvironmentBroken, match=r"(?s)router some-router 9\.9: .*no version of some-router==9\.9"):
        front(Router(package="some-router", version="9.9"), tmp_path, Path(sys.executable), silent)
    assert not list((tmp_path / ".parity" / "routers").iterdir())


# --- a start that fails


def raising(place: str) -> None:
    code = "raise AttributeError('it has no attribute x')"
    exec(compile(code, f"/env/site-packages/skyrl/{place}.py", "exec"))


@pytest.fixture
def stack(tmp_path: Path) -> HttpStack:
    made = HttpStack.__new__(HttpStack)
    made.request = SimpleNamespace(logs=str(tmp_path))
    return made


def test_a_router_that_does_not_start_is_named_with_its_place_and_its_own_words(stack: HttpStack, tmp_path: Path):
    logs = tmp_path / "router"
    logs.mkdir()
    (logs / "router-1.log").write_text("an earlier start\n")
    (logs / "router-2.log").write_text("\x1b[31mERROR\x1b[0m unknown policy\n")
    with pytest.raises(StartFailed) as told, stack._named_router():
        raising("inference_servers/vllm_router")
    assert "AttributeError: it has no attribute x: SkyRL cannot start vllm-router" in told.value.message
    assert "(skyrl/inference_servers/vllm_router.py:1" in told.value.message
    assert told.value.message.endswith("\n  router | ERROR unknown policy")
    assert "--router" in told.value.next_step


def test_an_error_of_the_servers_is_not_blamed_on_the_router(stack: HttpStack):
    with pytest.raises(AttributeError), stack._named_router():
        raising("inference_servers/server_group")
