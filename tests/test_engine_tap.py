"""The engine tap's records of an engine's arguments, and the schedule by which it delays messages."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest

from backends.vllm.engine_tap import _Log, _plain, _told
from backends.vllm.schedule import Schedule, order
from backends.vllm.tap_reader import TapReader
from harness.contract.delays import MOST_S, delay_s


@dataclass
class LoRARequest:
    """A stand-in for vLLM's class."""

    lora_name: str
    lora_path: str


def test_an_adapter_is_shown_by_its_tensors(tmp_path):
    spans = {"q.lora_A.weight": (0, 64), "q.lora_B.weight": (64, 320)}
    header = json.dumps({name: {"data_offsets": span} for name, span in spans.items()} | {"__metadata__": {}}).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(320))
    shown = _plain(LoRARequest(lora_name="policy", lora_path=str(tmp_path)))
    assert shown == {"name": "policy", "tensors": {"q.lora_A.weight": 64, "q.lora_B.weight": 256}}


def test_an_adapter_that_cannot_be_read_shows_none(tmp_path):
    assert _plain(LoRARequest(lora_name="policy", lora_path=str(tmp_path)))["tensors"] == {}
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00{}")
    assert _plain(LoRARequest(lora_name="policy", lora_path=str(tmp_path)))["tensors"] == {}


def test_a_schedule_delays_each_server_by_its_own_times_and_can_be_repeated(tmp_path):
    taps = [Schedule(tmp_path) for _ in range(2)]
    assert [tap.next_s("12-1") for tap in taps] == [None, None]
    order(tmp_path, 7, {"12-1": "server-0", "13-1": "server-1"})
    first = [[tap.next_s(name) for _ in range(3)] for tap, name in zip(taps, ("12-1", "13-1"), strict=True)]
    assert first == [[delay_s(7, f"server-{server}", number) for number in range(3)] for server in (0, 1)]
    assert len({*first[0], *first[1]}) == 6
    assert all(0 <= seconds < MOST_S for seconds in (*first[0], *first[1]))
    order(tmp_path, None, {})
    assert taps[0].next_s("12-1") is None
    order(tmp_path, 7, {"12-1": "server-0"})
    assert taps[0].next_s("12-1") == first[0][0]


def test_a_reader_gives_the_schedule_the_servers_names(tmp_path):
    reader, schedule = TapReader(tmp_path), Schedule(tmp_path)
    named = {"op": "collective_rpc", "arguments": {"method": "parity_whoami", "kwargs": {"name": "server-1"}}}
    line = {"kind": "control", "server": "12-1", "at_ns": 1, "data": named}
    (tmp_path / "12-1.jsonl").write_text(json.dumps(line) + "\n")
    reader.order(3)
    assert schedule.next_s("12-1") == delay_s(3, "server-1", 0)


def test_a_reader_keeps_the_errors_of_a_server_and_who_has_answered(tmp_path):
    reader = TapReader(tmp_path)
    named = {"op": "collective_rpc", "arguments": {"method": "parity_whoami", "kwargs": {"name": "server-1"}}}
    answers = [{"method": "POST", "path": "/pause", "status": status} for status in (200, 404)]
    lines = [{"kind": "control", "server": "12-1", "at_ns": 1, "data": named}]
    (tmp_path / "12-1.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert reader.served() == set()
    with (tmp_path / "12-1.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"kind": "answer", "server": "12-1", "at_ns": 2, "data": answer}) + "\n" for answer in answers
        )
    assert reader.served() == {"server-1"}
    assert reader.take() == [{"kind": "refusal", "server": "server-1", "at_ns": 2, "data": answers[1]}]


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The file of this process's engine."""
    made = _Log(tmp_path)
    monkeypatch.setattr(_Log, "last", made)
    with made._file:
        yield made


def test_the_tap_writes_down_the_status_of_an_error(tmp_path, log):
    sent = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 404})
        await send({"type": "http.response.body"})

    async def send(message):
        sent.append(message["type"])

    asyncio.run(_told(application)({"method": "POST", "path": "/done"}, None, send))
    assert sent == ["http.response.start", "http.response.body"]
    line = json.loads((tmp_path / f"{log.server}.jsonl").read_text())
    assert (line["kind"], line["data"]) == ("answer", {"method": "POST", "path": "/done", "status": 404})


def test_of_good_answers_the_tap_writes_down_the_first(tmp_path, log):
    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": scope["status"]})

    async def send(message):
        pass

    for status in (200, 200, 400, 200, 404):
        asyncio.run(_told(application)({"method": "POST", "path": "/pause", "status": status}, None, send))
    lines = (tmp_path / f"{log.server}.jsonl").read_text().splitlines()
    assert [json.loads(line)["data"]["status"] for line in lines] == [200, 400, 404]
