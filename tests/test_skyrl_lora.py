"""SkyRL's stacks and LoRA adapters: the client, name and folder of each call. Runs without SkyRL."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from backends.policies import lora
from backends.skyrl.http import HttpStack
from backends.skyrl.legacy import LegacyStack
from backends.skyrl.lora import Adapters
from backends.skyrl.release import RELEASES
from harness.contract.capability import Capability
from harness.contract.messages import (
    Empty,
    GenerateRequest,
    LoadLoraRequest,
    SampleRequest,
    StartRequest,
    UnloadLoraRequest,
)
from harness.contract.topology import topology


@dataclass
class Client:
    """The part of SkyRL's RemoteInferenceClient that LoRA adapters use."""

    active_lora_name: str | None = None
    loaded: list[str] = field(default_factory=list)
    closed: bool = False

    async def update_lora_from_disk(self, path: str) -> None:
        self.loaded.append(path)

    async def teardown(self) -> None:
        self.closed = True


def made(kind, tmp_path, name: str, since: str = "0.2.0"):
    stack = kind()
    stack.request = StartRequest(
        target="t",
        topology=topology(name),
        capabilities=list(Capability),
        model_path="/model",
        scratch=str(tmp_path),
        logs=str(tmp_path),
    )
    stack.release = next(release for release in RELEASES if release.since == since)
    stack.adapters = Adapters(str(tmp_path), "/model")
    stack.client = Client()
    stack.has_experts = False
    return stack


@pytest.fixture
def written(monkeypatch):
    found: list[tuple[Path, int]] = []
    monkeypatch.setattr(lora, "write", lambda folder, _model, version, _rank: found.append((folder, version)))
    return found


@pytest.mark.parametrize("kind", [HttpStack, LegacyStack])
def test_engines_take_adapters_or_weights(kind, tmp_path):
    of_adapters = {Capability.LORA, Capability.ADAPTER_BY_NAME}
    assert not of_adapters & made(kind, tmp_path, "disaggregated").capabilities()
    offered = made(kind, tmp_path, "lora").capabilities()
    assert of_adapters <= offered
    assert Capability.WEIGHT_SYNC not in offered


def test_http_has_a_client_for_each_name(tmp_path, written):
    stack = made(HttpStack, tmp_path, "lora")
    for name, version in (("one", 1), ("other", 2), ("one", 3)):
        asyncio.run(stack.load_lora_adapter(LoadLoraRequest(name=name, version=version)))
    one, other = stack.client_of("one"), stack.client_of("other")
    assert (one.active_lora_name, other.active_lora_name, stack.client_of(None).active_lora_name) == (
        "one",
        "other",
        None,
    )
    assert one.loaded == [str(tmp_path / "lora" / "one")] * 2, "a trainer writes each version to the same folder"
    assert other.loaded == [str(tmp_path / "lora" / "other")]
    assert [version for _, version in written] == [1, 2, 3]
    assert stack.client.loaded == []


def forgetful(tmp_path, status: int):
    """A stack with one adapter, whose servers answer the request to forget it with `status`; and the requests that they got."""
    asked = []

    class Direct:
        async def post(self, url, json):
            asked.append((url, json))
            return httpx.Response(status, request=httpx.Request("POST", url))

    async def on_workers(method):
        asked.append(method)

    stack = made(HttpStack, tmp_path, "lora")
    stack._direct, stack._urls, stack.on_workers = Direct(), ["http://a", "http://b"], on_workers
    asyncio.run(stack.load_lora_adapter(LoadLoraRequest(name="one", version=1)))
    return stack, asked


@pytest.mark.parametrize("status", [200, 404])
def test_http_forgets_every_name(tmp_path, written, status):
    stack, asked = forgetful(tmp_path, status)
    client = stack.client_of("one")
    asyncio.run(stack.forget_adapters(Empty()))
    gone = [(f"{url}/v1/unload_lora_adapter", {"lora_name": "one"}) for url in stack._urls]
    assert asked == [*gone, "parity_forget_adapters"]
    assert client.closed
    assert stack.adapters.clients == {}


def test_a_server_that_does_not_forget_is_an_error(tmp_path, written):
    stack, _ = forgetful(tmp_path, 500)
    with pytest.raises(httpx.HTTPStatusError, match="500"):
        asyncio.run(stack.forget_adapters(Empty()))


ANSWER = {"response_ids": [[1]], "responses": [""], "stop_reasons": ["length"]}
SAMPLE = {
    "sequences": [{"tokens": [1], "stop_reason": "length", "logprobs": None}],
    "prompt_logprobs": None,
    "topk_prompt_logprobs": None,
}


@dataclass
class NamingClient:
    """The same of 0.3.0's: adapters have names, and a request names its model."""

    model_name: str = "/model"
    asked: list[str | None] = field(default_factory=list)
    loaded: list[tuple[str, str]] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)

    async def generate(self, _batch, model: str | None = None):
        self.asked.append(model)
        return ANSWER

    async def sample(self, payload):
        self.asked.append(payload["json"].get("model"))
        return SAMPLE

    async def load_lora_adapter(self, name: str, path: str) -> None:
        self.loaded.append((name, path))

    async def unload_lora_adapter(self, name: str) -> None:
        self.unloaded.append(name)


def test_a_later_client_loads_and_unloads_by_name(tmp_path, written):
    stack = made(HttpStack, tmp_path, "lora", since="0.3.0")
    stack.client = NamingClient()
    asyncio.run(stack.load_lora_adapter(LoadLoraRequest(name="a", version=1)))
    assert stack.client.loaded == [("a", str(written[0][0]))]
    asyncio.run(stack.unload_lora_adapter(UnloadLoraRequest(name="a")))
    assert stack.client.unloaded == ["a"]


@pytest.mark.parametrize(("where", "asked"), [("lora", ["a", "/model"]), ("disaggregated", [None, None])])
def test_a_later_client_is_told_the_model_of_each_call_where_engines_take_adapters(tmp_path, where, asked):
    stack = made(HttpStack, tmp_path, where, since="0.3.0")
    stack.client = NamingClient()
    names = ["a", None] if where == "lora" else [None, None]
    for name in names:
        asyncio.run(stack.generate(GenerateRequest(prompt_token_ids=[[1]], lora_adapter=name)))
    for name in names:
        asyncio.run(stack.sample(SampleRequest(prompt_token_ids=[1], num_samples=1, lora_adapter=name)))
    assert stack.client.asked == [*asked, *asked]
