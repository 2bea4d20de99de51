"""A correct stack in a few lines, over the made-up model of `tests/traces.py`: what scenarios are driven against here.

It records calls and executions as the real handle does. It is no adapter: nothing starts, nothing is sent.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from fixtures.prompts import EOS, MAX_MODEL_LEN
from harness.checks.sampling import allowed, tempered
from harness.checks.stopping import stop_strings
from harness.contract import DetokenizeRequest as Detokenize
from harness.contract import DetokenizeResult as Detokenized
from harness.contract import (
    GenerateRequest,
    Generation,
    OpenAIRequest,
    OpenAIResponse,
    SampleRequest,
    TokenizeRequest,
    TokenizeResult,
)
from harness.errors import CallFailed
from harness.recording import Call, CallError, Observation
from harness.reference import NextRequest
from harness.topology import Topology
from tests import traces


class ToyStack:
    """Duck-types `harness.stack.Stack`, data plane only. `calls` and `observations` are what was recorded."""

    topology = Topology()
    model_name = traces.MODEL
    max_model_len = MAX_MODEL_LEN

    def __init__(self, reference: traces.FakeReference) -> None:
        self.reference = reference
        self.calls: list[Call] = []
        self.observations: list[Observation] = []
        self._free = random.Random(0)
        self._requests = itertools.count()

    async def generate(self, prompts, *, session_ids=None, label=None, **params):
        request = GenerateRequest(prompt_token_ids=prompts, session_ids=session_ids, sampling_params=params)
        return await self.generate_request(request, label=label)

    async def generate_messages(self, conversations, *, session_ids=None, label=None, **params):
        request = GenerateRequest(prompts=conversations, session_ids=session_ids, sampling_params=params)
        return await self.generate_request(request, label=label)

    async def generate_request(self, request, *, label=None):
        def answer():
            given = request.prompt_token_ids
            if (given is None) == (request.prompts is None):
                raise ValueError("either prompts or prompt_token_ids, but not both")
            prompts = given if given is not None else [traces.render(m) for m in request.prompts or []]
            if request.session_ids is not None and len(request.session_ids) != len(prompts):
                raise ValueError("one session id a prompt")
            return self._generation([self._run(p, request.sampling_params) for p in self._checked(prompts)])

        return await self._call("generate", request, answer, label)

    async def sample(self, prompt, num_samples, *, session_id=None, label=None, **params):
        request = SampleRequest(
            prompt_token_ids=prompt, num_samples=num_samples, sampling_params=params, session_id=session_id
        )
        rows = range(num_samples)
        return await self._call(
            "sample", request, lambda: self._generation([self._run(prompt, params, row) for row in rows]), label
        )

    async def completion(self, body, *, label=None):
        def answer():
            prompt = body["prompt"]
            single = isinstance(prompt, str) or all(isinstance(t, int) for t in prompt)
            prompts = [traces.encode(p) if isinstance(p, str) else p for p in ([prompt] if single else prompt)]
            return self._body(body, prompts, "text_completion", lambda run: {"text": run["text"]})

        return (await self._call("completion", OpenAIRequest(body=body), answer, label)).body

    async def chat_completion(self, body, *, label=None):
        def answer():
            if any(set(m) != {"role", "content"} for m in body["messages"]):
                return OpenAIResponse(body=_error("messages need a role and a content", 400))
            message = lambda run: {"message": {"role": "assistant", "content": run["text"]}}  # noqa: E731
            return self._body(body, [traces.render(body["messages"])], "chat.completion", message)

        return (await self._call("chat_completion", OpenAIRequest(body=body), answer, label)).body

    async def tokenize(self, texts, *, add_special_tokens=True, label=None):
        request = TokenizeRequest(texts=texts, add_special_tokens=add_special_tokens)
        result = TokenizeResult(token_ids=[traces.encode(t) for t in texts])
        return (await self._call("tokenize", request, lambda: result, label)).token_ids

    async def detokenize(self, token_ids, *, label=None):
        result = Detokenized(texts=[traces.decode(ids, skip_special_tokens=False) for ids in token_ids])
        return (await self._call("detokenize", Detokenize(token_ids=token_ids), lambda: result, label)).texts

    async def until_generating(self, *, requests, tokens=0):
        await asyncio.sleep(0)

    async def attempt(self, call):
        try:
            return await call
        except CallFailed:
            return None

    async def _call(self, method, request, answer, label):
        started = traces.tick()
        await asyncio.sleep(0)
        result = error = None
        try:
            result = answer()
        except ValueError as e:
            error = CallError(kind=type(e).__name__, message=str(e), status=400)
        await asyncio.sleep(0)  # callers that came together leave together
        self.calls.append(traces.call(method, request, result, error=error, label=label, started_ns=started))
        if error is not None:
            raise CallFailed(error.kind, error.message, status=error.status)
        return result

    def _checked(self, prompts):
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt cannot be empty")
            if len(prompt) >= MAX_MODEL_LEN:
                raise ValueError("the prompt is longer than the context length")
        return prompts

    def _body(self, body: dict[str, Any], prompts: list[list[int]], kind: str, content: Any) -> OpenAIResponse:
        if body["model"] != self.model_name:
            return OpenAIResponse(body=_error(f"the model {body['model']} does not exist", 404))
        try:
            runs = [self._run(prompt, body) for prompt in self._checked(prompts)]
        except ValueError as e:
            return OpenAIResponse(body=_error(str(e), 400))
        choices = [
            {"index": i, "finish_reason": run["reason"], "token_ids": run["tokens"]} | content(run)
            for i, run in enumerate(runs)
        ]
        count, made = sum(map(len, prompts)), sum(len(run["tokens"]) for run in runs)
        usage = {"prompt_tokens": count, "completion_tokens": made, "total_tokens": count + made}
        about = {"id": "cmpl-1", "object": kind, "created": 1, "model": self.model_name}
        return OpenAIResponse(body=about | {"choices": choices, "usage": usage})

    def _generation(self, runs: list[dict[str, Any]]) -> Generation:
        asked = any(run["logprobs"] is not None for run in runs)
        return Generation(
            response_ids=[run["tokens"] for run in runs],
            responses=[run["text"] for run in runs],
            stop_reasons=[run["reason"] for run in runs],
            response_logprobs=[run["logprobs"] for run in runs] if asked else None,
        )

    def _run(self, prompt: list[int], params: dict[str, Any], copy: int = 0) -> dict[str, Any]:
        """One request: tokens, text, finish reason, log-probabilities. Seen by the tap."""
        temperature, most = _validated(params)
        seed = params.get("seed")
        rng = self._free if seed is None else random.Random(f"{seed + copy} {prompt}")
        stops, least = set(params.get("stop_token_ids") or ()), params.get("min_tokens") or 0
        if not params.get("ignore_eos"):
            stops.add(EOS)
        strings, skip = stop_strings(params), params.get("skip_special_tokens", True)
        tokens: list[int] = []
        reason, text = "length", ""
        while len(tokens) < min(most, MAX_MODEL_LEN - len(prompt)):
            barred = stops if len(tokens) < least else set()
            tokens.append(self._next(prompt + tokens, params, temperature, rng, barred))
            text = traces.decode(tokens, skip_special_tokens=skip)
            met = next((s for s in strings if s in text), None)
            if met is not None:
                text = text[: text.index(met) + (len(met) if params.get("include_stop_str_in_output") else 0)]
            if met is not None or (tokens[-1] in stops and len(tokens) > least):
                reason = "stop"
                break
        logprobs = self.reference.logprobs(prompt, tokens) if params.get("logprobs") is not None else None
        number = next(self._requests)
        server = f"server-{number % 2}"
        self.observations += traces.executed(
            prompt, tokens, server=server, request_id=f"request-{number}", params=params, reason=reason, from_ns=number
        )
        return {"tokens": tokens, "text": text, "reason": reason, "logprobs": logprobs}

    def _next(
        self, context: list[int], params: dict[str, Any], temperature: float, rng: random.Random, barred: set[int]
    ) -> int:
        bias = {int(token): extra for token, extra in (params.get("logit_bias") or {}).items()}
        model = [
            logprob + bias.get(token, 0.0)
            for token, logprob in enumerate(self.reference.next(NextRequest(version=0, prompt=context)).logprobs)
        ]
        open_to = set(params.get("allowed_token_ids") or range(len(model))) - barred
        if temperature == 0:
            return max(open_to, key=model.__getitem__)
        probabilities = tempered(model, temperature)
        kept = sorted(allowed(probabilities, params) & open_to)
        return rng.choices(kept, [probabilities[t] for t in kept])[0]


def _validated(params: dict[str, Any]) -> tuple[float, int]:
    temperature, most, top_p = params.get("temperature", 1.0), params.get("max_tokens", 16), params.get("top_p", 1.0)
    if not isinstance(temperature, int | float) or temperature < 0:
        raise ValueError("temperature must be a number that is not negative")
    if most < 1:
        raise ValueError("max_tokens must be at least 1")
    if not 0 < top_p <= 1:
        raise ValueError("top_p must be in (0, 1]")
    return temperature, most


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}
