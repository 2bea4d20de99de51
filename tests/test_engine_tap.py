"""The engine tap's records of an engine's arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass

from backends.vllm.engine_tap import _plain


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
