"""SkyRL's HTTP stack and what it says of its weights: who counts syncs, and how a label travels. Runs without SkyRL."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from backends.skyrl.http import HttpStack
from backends.skyrl.release import RELEASES
from backends.skyrl.senders import ByEngine, TrainerFailed
from harness.contract.messages import Empty, GenerateRequest, SyncWeightsRequest

URLS = ["http://a", "http://b"]


class Client:
    """The part of SkyRL's RemoteInferenceClient that says something of the weights."""

    server_urls = URLS
    model_name = "/model"
    weight_version = 0

    def increment_weight_version(self) -> None:
        self.weight_version += 1

    async def _call_all_servers(self, endpoint: str, method: str):
        assert (endpoint, method) == ("/weight_info", "GET")
        return {url: {"body": {"weight_version": f"label of {url}"}} for url in URLS}


class Trainer:
    def __init__(self) -> None:
        self.labels: list[str | None] = []

    async def send(
        self, *_version: object, fail_after_chunks: int | None, sparse: bool, unfit: str | None, label: str | None
    ) -> None:
        if fail_after_chunks is not None:
            raise TrainerFailed("as requested")
        self.labels.append(label)


def made(since: str) -> HttpStack:
    stack = HttpStack()
    stack.release = next(release for release in RELEASES if release.since == since)
    stack.client, stack._trainer, stack._urls = Client(), Trainer(), URLS
    return stack


@pytest.mark.parametrize(("since", "counted"), [("0.2.0", 0), ("0.3.0", 2), ("0.4.0", 2)])
def test_the_client_is_told_of_completed_syncs_as_skyrls_trainer_tells_it(since, counted):
    stack = made(since)
    for request in (SyncWeightsRequest(version=1), SyncWeightsRequest(version=1)):
        asyncio.run(stack.sync_weights(request))
    with pytest.raises(TrainerFailed):
        asyncio.run(stack.sync_weights(SyncWeightsRequest(version=2, fail_after_chunks=1)))
    assert stack.client.weight_version == counted


def test_each_server_tells_its_own_label():
    stack = made("0.4.0")
    asyncio.run(stack.sync_weights(SyncWeightsRequest(version=1, weight_label="first")))
    assert stack._trainer.labels == ["first"]
    told = asyncio.run(stack.weight_labels(Empty()))
    assert told.servers == {"server-0": "label of http://a", "server-1": "label of http://b"}


@pytest.mark.parametrize("label", ["first", None])
def test_the_label_comes_with_the_end_of_the_update(label):
    finished: list[str | None] = []
    client = SimpleNamespace(update_weights=lambda _info: None, finish_weight_update=finished.append)

    def send_weights() -> None:
        client.update_weights({})
        assert finished == []
        client.finish_weight_update()

    sender = ByEngine("float32", "cpu")
    sender.engine = SimpleNamespace(client=client, send_weights=send_weights)
    sender._watch(client)
    asyncio.run(sender.send({}, 1, None, label))
    assert finished == [label]


class Single:
    """SkyRL's RemoteGenerateClient."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []

    async def generate(self, **asked: object) -> SimpleNamespace:
        self.asked.append(asked)
        return SimpleNamespace(response_ids=[len(self.asked)], stop_reason="length", response_logprobs=[-1.0])


@pytest.mark.parametrize(("params", "logprobs"), [({"logprobs": 0}, [[-1.0], [-1.0]]), ({}, None)])
def test_each_row_is_a_request_of_the_single_client(params, logprobs):
    stack = made("0.4.0")
    stack.request, stack._single = SimpleNamespace(topology=SimpleNamespace(lora=False)), Single()
    request = GenerateRequest(prompt_token_ids=[[5], [6]], session_ids=["a", "b"], sampling_params=params, single=True)
    found = asyncio.run(stack.generate(request))
    assert [(one["prompt_token_ids"], one["session_id"], one["model"]) for one in stack._single.asked] == [
        ([5], "a", "/model"),
        ([6], "b", "/model"),
    ]
    assert (found.response_ids, found.responses, found.response_logprobs) == ([[1], [2]], None, logprobs)
