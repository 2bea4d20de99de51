"""SmolLM2 is made from its package and answers sensibly; the reference describes its vocabulary. Runs in a stack's environment."""

from __future__ import annotations

import json

import pytest

from harness.contract.vocabulary import LLAMA_SAMPLING, TINY, TINY_SAMPLING
from harness.driving import models
from harness.machine.progress import console_progress
from tests.real.scripts import interpreter

pytestmark = pytest.mark.real

ASK = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
asked = [{"role": "user", "content": "What is the capital of France?"}]
ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
made = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
text = "a\\u2581b  <|im_end|>"
print(json.dumps([tokenizer.decode(made), tokenizer.decode(tokenizer.encode(text)) == text, tokenizer.eos_token_id]))
"""

FACTS = """
import asyncio, json, sys
from backends.oracle.reference import Reference
from harness.contract.vocabulary import TINY
from harness.contract.messages import Empty, StartRequest
from harness.contract.topology import Topology

async def facts(path):
    reference = Reference()
    await reference.start(StartRequest(target="reference", topology=Topology(), model_path=path, scratch="", logs=""))
    return reference._tokenizer, await reference.vocabulary(Empty())

said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "bye"}]
found = []
for path in sys.argv[1:]:
    tokenizer, model = asyncio.run(facts(path))
    by_tokenizer = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    read_back = tokenizer.decode(model.spelled("abcxyz"))
    told = [model.rendered(said) == by_tokenizer, read_back, len(model.parts), model.one_space, model.cleans, model.sampling]
    found.append([model == TINY, *told])
print(json.dumps(found))
"""


def test_smollm2_knows_the_capital_of_france_and_its_tokenizer_loses_nothing(run):
    model = models.smollm2(interpreter(), console_progress())
    answer, lossless, end = run(ASK, model)
    assert "Paris" in answer
    assert lossless
    assert end == json.loads((model / "config.json").read_text())["eos_token_id"]


def test_the_reference_reads_the_facts_of_a_vocabulary(run):
    made = [models.tiny_model(interpreter(), console_progress(), family) for family in ("qwen2", "llama")]
    tiny, llama, real = run(FACTS, *made, models.smollm2(interpreter(), console_progress()))
    assert tiny == [True, True, "abcxyz", 94, TINY.space, False, TINY_SAMPLING]
    assert llama == [False, True, "abcxyz", 94, 259, True, LLAMA_SAMPLING]
    assert real == [False, True, "abcxyz", 79, 216, False, {}]
