"""The client: splits batches into requests, answers OpenAI bodies, sends control calls to all servers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import numpy as np

from backends.miniature import model, parameters, tokenizer, trainer
from backends.miniature.deltas import Deltas
from backends.miniature.engine import BadRequest, Engine, Output
from backends.miniature.router import HopBroken, Router
from backends.miniature.trainer import Publisher
from backends.policies import megatron
from harness.contract.messages import (
    NOBODY,
    REQUEST_CAP,
    ClientLifeRequest,
    GenerateRequest,
    Generation,
    Layout,
    PauseMode,
    SampleRequest,
    Scalar,
    SessionId,
    Training,
    Unfit,
    unfitting,
)
from harness.records.wire import REQUEST_ID, header

T = TypeVar("T")
MODEL = "miniature"
Setting = Scalar | list[str]
CONFIGURATION: dict[str, Setting] = {
    "generator.backend": MODEL,
    "generator.batched": False,
    "generator.inference_engine.expert_parallel_size": 1,
    "generator.inference_engine.external_proxy_url": None,
    "generator.inference_engine.external_server_urls": None,
    "generator.inference_engine.num_engines": 2,
    "generator.inference_engine.tensor_parallel_size": 1,
    "generator.max_input_length": 512,
    "generator.max_turns": 1,
    "generator.merge_stepwise_output": False,
    "generator.sampling_params.max_generate_length": 1024,
    "generator.sampling_params.stop": None,
    "generator.sampling_params.temperature": 1.0,
    "generator.step_wise_trajectories": False,
    "trainer.logger": "console",
    "trainer.max_prompt_length": 512,
    "trainer.placement.colocate_all": False,
    "trainer.placement.policy_num_gpus_per_node": 2,
}
SAMPLING = {
    "generator.sampling_params.max_generate_length": "max_tokens",
    "generator.sampling_params.stop": "stop",
    "generator.sampling_params.temperature": "temperature",
}
"""Key of the configuration → sampling parameter of requests."""


class TrainerFailed(RuntimeError):
    """The trainer failed in the middle of a sync."""


async def all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. If a call fails, the others are cancelled and its error is raised."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class Client:
    """The trainer's client. It can be pickled; `connect` restores its router and engines."""

    def __init__(self) -> None:
        self._number = 0
        self.fired = 0
        self.syncs = 0
        """Number of completed syncs."""
        self.closed = False
        self.policies = ""
        """Folder of trained policy versions."""
        self.without_tokenizer = False
        self.recommended: Mapping[str, float] = tokenizer.VOCABULARY.sampling
        """Sampling parameters that the checkpoint recommends."""
        self.begins_texts = False
        """True if the tokenizer begins a text with a token of its own, as that of Llama does."""
        self.takes_adapters = False
        """True if engines take adapters, so that no sync brings the base model back."""
        self.model = MODEL
        """Name under which requests ask for the base model."""
        self.key = ""
        """The key for the engines' API in the environment; empty if there is none."""
        self.deltas = False
        """True if syncs go by a shared disk."""
        self.publisher: Publisher | None = None
        """What writes them there, once a trainer has joined."""

    def connect(self, router: Router, engines: list[Engine]) -> None:
        self.router, self.engines = router, engines
        self.slots = asyncio.Semaphore(REQUEST_CAP * len(engines))

    def configuration(self, overrides: Mapping[str, Setting]) -> dict[str, Setting]:
        """The configuration with these values in place of its own. Raises KeyError for a key that it does not have."""
        if strange := sorted(overrides.keys() - CONFIGURATION.keys()):
            raise KeyError(f"the configuration has no key {', '.join(strange)}")
        return {**CONFIGURATION, **overrides}

    def validate(self, configuration: Mapping[str, Setting]) -> None:
        """Raises ValueError, with the keys, for settings that exclude each other."""
        engines = "generator.inference_engine."
        named = {key.rpartition(".")[2]: value for key, value in configuration.items()}
        outside = [name for name in ("external_server_urls", "external_proxy_url") if named[name] is not None]
        if named["colocate_all"] and outside:
            raise ValueError(f"trainer.placement.colocate_all excludes {engines}{outside[0]}")
        if named["expert_parallel_size"] not in (1, named["tensor_parallel_size"]):
            raise ValueError(f"{engines}expert_parallel_size is neither 1 nor tensor_parallel_size")
        if named["max_turns"] == 1 and named["max_input_length"] != named["max_prompt_length"]:
            raise ValueError("generator.max_input_length differs from trainer.max_prompt_length, with one turn")
        if named["merge_stepwise_output"] and not named["step_wise_trajectories"]:
            raise ValueError("generator.merge_stepwise_output needs generator.step_wise_trajectories")

    def sampling(self, configuration: Mapping[str, Setting]) -> dict[str, Scalar]:
        """The sampling parameters of requests under this configuration."""
        found = {SAMPLING[key]: value for key, value in configuration.items() if key in SAMPLING}
        return {name: value for name, value in found.items() if isinstance(value, Scalar)}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("router", "engines", "slots")}

    def configure(self, request: ClientLifeRequest) -> None:
        """Take what the configuration says: the name of the model, which engines may not have. A merged adapter has none. Raises
        ConnectionError for addresses at which nobody answers."""
        if request.names == "nobody's":
            raise ConnectionError(f"nobody answers at {NOBODY}")
        self.model = "another checkpoint" if request.another_model else MODEL

    def listen(self, *, port_taken: bool) -> None:
        """Open the configured address. Raises RuntimeError if another process has its port."""
        if port_taken:
            raise RuntimeError("the port of the address is in use by another process")

    def close(self) -> None:
        """Calls in flight end as usual; later ones are refused."""
        self.closed = True

    def alone(self) -> None:
        """Its owner drops everything else that was made with it: it has what it needs."""

    def left(self) -> list[str]:
        """What a client leaves open that nobody uses any more."""
        return []

    # --- data plane

    async def generate(self, request: GenerateRequest) -> Generation:
        """SkyRL API reference, InferenceEngineInterface.generate. Raises BadRequest before it sends any request."""
        if (request.prompt_token_ids is None) == (request.prompts is None):
            raise BadRequest("either prompts or prompt_token_ids are needed, and not both")
        if request.sampling_params.get("n", 1) > 1:
            raise BadRequest("n > 1 is not supported: generate() has one answer per prompt")
        if request.mm_features is not None:
            self.refuse_images()
        prompts = request.prompt_token_ids
        if prompts is None:
            prompts = [tokenizer.render(messages) for messages in request.prompts or []]
        given = self.sessions(request)
        sessions = given if given is not None else [None] * len(prompts)
        if len(sessions) != len(prompts):
            raise BadRequest(f"{len(sessions)} session ids for {len(prompts)} prompts")
        more = {"adapter": request.lora_adapter, "salt": request.cache_salt}
        rows = await self.gather(
            [
                self.row(session, self.prompt_of_turn(prompt), request.sampling_params, **more)
                for session, prompt in zip(sessions, prompts, strict=True)
            ]
        )
        found = self.generation(rows)
        return msgspec.structs.replace(found, responses=None) if request.single else found

    def sessions(self, request: GenerateRequest) -> list[SessionId] | None:
        """The sessions of a batch; None if it has none."""
        return request.session_ids

    def refuse_images(self) -> None:
        """Raises BadRequest: the model reads texts only."""
        raise BadRequest("images: this is no multimodal model")

    async def gather(self, calls: Sequence[Any]) -> list[Output]:
        """All rows in order, or the error of one."""
        return await all_or_none(calls)

    def prompt_of_turn(self, prompt: list[int]) -> list[int]:
        """The prompt to send: the given token ids, unchanged."""
        return prompt

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        """One row as one request, once fewer than the cap are in flight."""
        if self.closed:
            raise BadRequest("the client is closed")
        if self.model != MODEL:
            raise BadRequest(f"the model {self.model} does not exist")
        async with self.slot():
            return await self.over_a_connection(session, prompt, params, **more)

    def slot(self) -> AbstractAsyncContextManager[Any]:
        """What a request holds while it is in flight: one of the slots that all calls share."""
        return self.slots

    def generation(self, rows: list[Output]) -> Generation:
        """Rows as columns."""
        asked = any(row.logprobs is not None for row in rows)
        return Generation(
            response_ids=[row.tokens for row in rows],
            responses=[row.text for row in rows],
            stop_reasons=[row.reason for row in rows],
            response_logprobs=[None if row.logprobs is None else [*row.logprobs] for row in rows] if asked else None,
            routed_experts=[row.experts for row in rows],
        )

    async def over_a_connection(
        self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any
    ) -> Output:
        """Send a request to the router, over another connection if the first one had gone stale (RFC 9112, 9.3.1)."""
        try:
            return await self.router.generate(session, prompt, params, **more)
        except HopBroken as e:
            if not self.asks_again(e):
                raise
            return await self.router.generate(session, prompt, params, **more)

    def asks_again(self, error: HopBroken) -> bool:
        return error.untaken

    async def sample(self, request: SampleRequest) -> Generation:
        """SkyRL #934: independent continuations on one server, seeded with seed + i as vLLM seeds its n choices."""
        params, seed = request.sampling_params, request.sampling_params.get("seed")
        if said := parameters.wrong(params):
            raise BadRequest(said)
        if request.image is not None:
            self.refuse_images()
        each = [params if seed is None else params | {"seed": seed + i} for i in range(request.num_samples)]
        engine = self.router.server_of(request.session_id)
        more = {"engine": engine, "adapter": request.lora_adapter}
        calls = [self.row(request.session_id, request.prompt_token_ids, one, **more) for one in each]
        samples = self.generation(await self.gather(calls))
        if not request.prompt_logprobs:
            return samples
        prompt, most = request.prompt_token_ids, request.topk_prompt_logprobs
        rows = engine.prompt_rows(prompt)
        return msgspec.structs.replace(
            samples,
            prompt_logprobs=self.prompt_logprobs(prompt, rows),
            topk_prompt_logprobs=[None, *(self.most_probable(row, most) for row in rows)] if most else None,
        )

    async def tinker_sample(self, request: SampleRequest) -> Generation:
        """SkyRL, SkyRLTrainBackend.sample: each sample is a request of its own, seeded as vLLM seeds its n choices. The first one of
        them has the prompt's numbers. If they are forwarded, they are one request."""
        if request.forwarded:
            whole = await self.sample(request)
            if "abort" in whole.stop_reasons:
                self.refuse_parts()
            return whole
        each = [
            msgspec.structs.replace(
                request,
                num_samples=1,
                sampling_params=request.sampling_params | {"seed": seed},
                prompt_logprobs=request.prompt_logprobs and i == 0,
            )
            for i, seed in enumerate(self.seeds(request.sampling_params["seed"], request.num_samples))
        ]
        done = await asyncio.gather(*(self.sample(one) for one in each))
        if any("abort" in one.stop_reasons for one in done):
            self.refuse_parts()
        return msgspec.structs.replace(
            done[0],
            response_ids=[tokens for one in done for tokens in one.response_ids],
            stop_reasons=[reason for one in done for reason in one.stop_reasons],
            response_logprobs=[numbers for one in done for numbers in one.response_logprobs or ()],
            responses=None,
            routed_experts=None,
        )

    def refuse_parts(self) -> None:
        """Raises BadRequest: Tinker has no reason for a sample that was cut short."""
        raise BadRequest("a pause cut a sample short")

    def seeds(self, seed: int, samples: int) -> list[int]:
        """One for each sample of a request of Tinker's."""
        return list(range(seed, seed + samples))

    def prompt_logprobs(self, prompt: list[int], rows: list[model.Array]) -> list[float | None]:
        """Of each prompt token, from the distributions at the positions before it. The first token has none."""
        return [None, *(float(row[token]) for row, token in zip(rows, prompt[1:], strict=True))]

    def most_probable(self, row: model.Array, most: int) -> list[tuple[int, float]]:
        """The `most` most probable tokens of a distribution, in order."""
        return [(int(token), float(row[token])) for token in np.argsort(-row, kind="stable")[:most]]

    # --- OpenAI bodies

    async def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """SkyRL API reference, InferenceEngineClient.completion: single or batched, text or token ids. Returns errors as bodies."""
        given = body["prompt"]
        single = isinstance(given, str) or all(isinstance(token, int) for token in given)
        if not all(isinstance(row, str | list) for row in ([given] if single else given)):
            return error_body("a prompt is a text or a list of tokens", 400)
        asked = body.get("add_special_tokens")
        special = True if asked is None else asked
        prompts = [self.encoded(p, special) if isinstance(p, str) else p for p in ([given] if single else given)]
        return await self._answered(body, prompts, "text_completion")

    async def chat_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """SkyRL API reference, InferenceEngineClient.chat_completion. Returns errors as bodies."""
        said = body["messages"]
        if any("role" not in message or not {"content", "tool_calls"} & {*message} for message in said):
            return error_body("a message needs a role, and a content or calls of tools", 400)
        if any(message["role"] == "user" and self.content_of(message) is None for message in said):
            return error_body("a user's message needs a content", 400)
        if unread := next((kind for message in said if (kind := self.unread(message)) is not None), None):
            return error_body(f"the model reads no parts of the type {unread}", 400)
        prompt = self.rendered([*map(self.as_rendered, said)], body)
        if (tool := self.tool_to_call(body)) is None:
            return await self._answered(body, [prompt], "chat.completion")
        shape = {"type": "json_schema", "json_schema": {"name": tool["name"], "schema": tool["parameters"]}}
        answer = await self._answered(body | {"response_format": shape}, [prompt], "chat.completion")
        for choice in answer.get("choices", ()):
            choice["message"] = self.calling(tool["name"], choice)
        return answer

    def rendered(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[int]:
        """The prompt of a chat."""
        return tokenizer.render(messages, tools=self.tools(body))

    def tool_to_call(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The function that the model has to call (OpenAI API reference, tool_choice); None if it may answer."""
        match body.get("tool_choice"):
            case "required":
                return dict(body["tools"][0]["function"])
            case {"function": {"name": name}}:
                return next(dict(one["function"]) for one in body["tools"] if one["function"]["name"] == name)
            case _:
                return None

    def calling(self, name: str, choice: dict[str, Any]) -> dict[str, Any]:
        """The message that calls a function with what the model wrote."""
        function = {"name": name, "arguments": choice["message"]["content"]}
        calls = [{"id": f"call_{choice['index']}", "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def content_of(self, message: dict[str, Any]) -> Any:
        """The content of a user's message; None if it has none."""
        return message.get("content")

    def unread(self, message: dict[str, Any]) -> str | None:
        """The type of the first part that is no text; None if there is none."""
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        return next((str(part.get("type")) for part in parts if part.get("type") != "text"), None)

    def as_rendered(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as templates read it: its content as a text (vLLM documentation, OpenAI-Compatible Server:
        --chat-template-content-format), the arguments of its calls as objects, its reasoning by its earlier name."""
        content = message.get("content") or ""
        calls = [
            call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or []
        ]
        return message | {
            "content": content if isinstance(content, str) else "\n".join(part["text"] for part in content),
            "tool_calls": calls,
            "reasoning_content": message.get("reasoning"),
        }

    def tools(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The tools that a chat offers, as the template shows them."""
        return body.get("tools") or []

    def identified(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """The body with the request's id from the header (vLLM documentation, Extra HTTP Headers)."""
        given = header(headers, REQUEST_ID)
        return body if given is None else body | {"request_id": given}

    async def _answered(self, body: dict[str, Any], prompts: list[list[int]], kind: str) -> dict[str, Any]:
        if (refused := self.unauthorized() or self.nameless(body)) is not None:
            return refused
        if body["model"] != MODEL and not any(body["model"] in engine.adapters for engine in self.engines):
            return error_body(f"the model {body['model']} does not exist", 404)
        if said := parameters.wrong(body):
            return error_body(said, 400)
        adapter = self.adapter_of(body["model"])
        sessions, params = self.sessions_of(body, len(prompts)), self.with_defaults(sampling_params(body))
        seed, copies = params.get("seed"), body.get("n") or 1
        each = [params if seed is None else params | {"seed": seed + copy} for copy in range(copies)]
        try:
            rows = await self.gather(
                [
                    self.row(session, prompt, one, adapter=adapter)
                    for session, prompt in zip(sessions, prompts, strict=True)
                    for one in each
                ]
            )
        except BadRequest as e:
            return error_body(str(e), 400)
        except HopBroken as e:
            return error_body(str(e), e.status or 502)
        self._number += 1
        return {
            "id": f"cmpl-{body.get('request_id') or self._number}",
            "object": kind,
            "created": 1,
            "model": body["model"],
            "choices": [self.choice(index, row, kind) for index, row in enumerate(rows)],
            "usage": self.usage(rows, copies),
        }

    def sessions_of(self, body: dict[str, Any], prompts: int) -> list[SessionId | None]:
        """A session for each prompt: the body has one for all, or a list (SkyRL API reference, completion)."""
        given = body.get("session_id")
        return given if isinstance(given, list) and len(given) == prompts else [given] * prompts

    def with_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """Parameters that are left out, or null, are what the checkpoint recommends (vLLM documentation, OpenAI-Compatible Server)."""
        return {**self.recommended, **{name: value for name, value in given.items() if value is not None}}

    def bearer(self) -> str:
        """The key that a body comes with (vLLM documentation, VLLM_API_KEY: it protects the OpenAI-style routes)."""
        return self.key

    def unauthorized(self) -> dict[str, Any] | None:
        """The error for a body without the engines' key; None if it has it."""
        accepted = all(engine.key in ("", self.bearer()) for engine in self.engines)
        return None if accepted else error_body("Unauthorized", 401)

    def nameless(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The error for a body that names no model (SkyRL 0.3.0, RemoteInferenceClient); None for one that does."""
        return None if body.get("model") else error_body("`model` is required: name the base model or an adapter", 400)

    def adapter_of(self, name: str) -> str | None:
        """vLLM documentation, LoRA Adapters: a body's model is an adapter's name, or the base model's."""
        return None if name == MODEL else name

    def choice(self, index: int, row: Output, kind: str) -> dict[str, Any]:
        shared: dict[str, Any] = {"index": index, "finish_reason": row.reason, "token_ids": row.tokens}
        if row.logprobs is not None:
            shared["logprobs"] = self.logprobs(row, kind)
        if kind == "text_completion":
            return shared | {"text": row.text}
        return shared | {"message": {"role": "assistant", "content": row.text}}

    def logprobs(self, row: Output, kind: str) -> dict[str, Any]:
        """In OpenAI's form: columns in a completion, one object per token in a chat."""
        texts, numbers = [tokenizer.decode([token]) for token in row.tokens], row.logprobs or []
        if kind == "text_completion":
            return {"tokens": texts, "token_logprobs": numbers}
        return {"content": [{"token": t, "logprob": x} for t, x in zip(texts, numbers, strict=True)]}

    def usage(self, rows: list[Output], copies: int = 1) -> dict[str, int]:
        """Tokens of all prompts and choices. A prompt counts once, even if it has several choices."""
        prompt, made = sum(len(row.prompt) for row in rows[::copies]), sum(len(row.tokens) for row in rows)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    # --- tokenizer

    def syncs_of_engines(self) -> int:
        """Number of syncs that the engines completed, whichever copy of the client made them."""
        return max(engine.syncs for engine in self.engines)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a conversation."""
        return tokenizer.render([dict(one) for one in messages])

    def tokenize(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encoded(text, add_special_tokens) for text in texts]

    def encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        """A text's tokens, after the one with which the tokenizer begins a text, if it has one."""
        return tokenizer.encode(text, begins=self.begins_texts and add_special_tokens)

    def detokenize(self, token_ids: list[list[int]]) -> list[str]:
        """The texts. A client without a tokenizer asks a server for each."""
        read = self.read_by_a_server if self.without_tokenizer else self.read
        return [read(ids) for ids in token_ids]

    def read(self, ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    def read_by_a_server(self, ids: list[int]) -> str:
        return self.read(ids)

    def finish_session(self, session: SessionId) -> None:
        self.router.finish_session(session)

    # --- control plane

    async def everywhere(self, op: str, **arguments: Any) -> None:
        """SkyRL #904, "Control plane (fan-out)": call every server at once. Raises the first error after all calls have ended."""
        calls = (self.tell(engine, op, **arguments) for engine in self.engines)
        found = await asyncio.gather(*calls, return_exceptions=True)
        if errors := [result for result in found if isinstance(result, BaseException)]:
            raise errors[0]

    async def tell(self, engine: Engine, op: str, **arguments: Any) -> None:
        """One control call to one server."""
        await self.router.control(engine, op, **arguments)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self.everywhere("pause_generation", mode=mode, clear_cache=clear_cache)

    def paused(self) -> dict[str, bool]:
        """Whether each living server is paused."""
        return {engine.name: engine.frozen for engine in self.engines if not engine.dead}

    def world_size(self) -> int:
        """Inference workers over all servers."""
        return sum(len(engine.workers) for engine in self.engines)

    # --- weight sync

    async def sync_weights(self, version: int, chunks: int, layout: Layout = "single") -> None:
        """Send the trainer's parameters to all servers in `chunks` pieces. They take effect once the last piece has arrived."""
        await self.send(self.pieces(version, chunks, layout))

    async def send_sparse(self, version: int) -> None:
        """A sync of every second parameter."""
        (whole,) = self.pieces(version, 1)
        await self.send([{name: whole[name] for name in list(whole)[::2]}])

    async def send_unfit(self, version: int, unfit: Unfit) -> None:
        """A sync with a parameter that no engine has. Raises BadRequest."""
        await self.send([unfitting(piece, unfit) for piece in self.pieces(version, 1)])

    async def give_up(self, version: int, chunks: int, layout: Layout, after: int) -> None:
        """A sync in which the trainer fails after it has sent `after` pieces. Raises TrainerFailed."""
        await self.send(self.pieces(version, chunks, layout)[:after], whole=False)
        raise TrainerFailed(f"the trainer failed after {after} chunks of policy version {version}")

    def pieces(self, version: int, chunks: int, layout: Layout = "single") -> list[model.Parameters]:
        """The trainer's parameters in `chunks` pieces."""
        tensors = dict(trainer.parameters(version, self.policies))
        match layout:
            case "fsdp2":
                tensors = {name: self.gathered(self.shards(tensor)) for name, tensor in tensors.items()}
            case "megatron":
                tensors = self.of_ranks(megatron.to_ranks(tensors, trainer.MEGATRON, np.concatenate))
            case "single":
                pass
        names = list(tensors)
        cuts = [part * len(names) // chunks for part in range(chunks + 1)]
        return [{name: tensors[name] for name in names[a:b]} for a, b in itertools.pairwise(cuts)]

    async def send(self, pieces: list[model.Parameters], *, whole: bool = True) -> None:
        """Send these pieces to all servers. `whole` is True if they complete the sync."""
        if self.publisher is not None:
            if whole:
                await self.load(self.publisher.publish(pieces))
            return
        await self.everywhere("start_weight_update")
        for piece in pieces:
            await self.everywhere("update_weights", names=list(piece), tensors=piece)
        if whole:
            await self.everywhere("finish_weight_update")

    async def load(self, deltas: Deltas) -> None:
        """Every server applies to its checkpoint what was published, and loads that."""
        await self.everywhere("start_weight_update")
        for delta in deltas:
            await self.everywhere("load_delta_weights", delta=delta)
        await self.everywhere("finish_weight_update")

    def join(self) -> None:
        """A trainer that joins begins with the checkpoint that it was given, and so do the servers."""
        if self.deltas:
            base = trainer.parameters(0, self.policies)
            self.publisher = Publisher(base)
            for engine in self.engines:
                engine.checkpoint = dict(base)

    async def sent_by_worker(self, _training: Training) -> None:
        """The worker of any kind of training drops the prefix cache once it has sent the parameters."""
        await self.everywhere("reset_prefix_cache", reset_running_requests=False)

    def arguments(self, engine: Engine, options: Mapping[str, Scalar], *, device: bool) -> dict[str, Scalar]:  # noqa: ARG002
        """What this engine would be started with. Its node has the devices that count; `device` is False if the driver has none."""
        return engine.arguments(options)

    def sync_backend(self, named: str) -> str:
        """The backend of weight syncs. Raises ValueError for one that does not exist (SkyRL documentation, weight_sync_backend)."""
        if named not in ("nccl", "gloo"):
            raise ValueError(f"there is no weight_sync_backend {named}")
        return named

    def synced(self, label: str | None) -> None:
        """After a completed sync: count it, and name every server's weights."""
        self.syncs += 1
        for engine in self.engines:
            engine.name_weights(label)

    def shards(self, tensor: model.Array) -> list[model.Array]:
        """A tensor as two FSDP2 processes hold it: halves along its first dimension."""
        return np.array_split(tensor, 2)

    def gathered(self, shards: list[model.Array]) -> model.Array:
        """The whole tensor."""
        return np.concatenate(shards)

    def of_ranks(self, ranks: list[dict[str, model.Array]]) -> dict[str, model.Array]:
        """The whole tensors, from four ranks that hold them in Megatron's layout."""
        return megatron.from_ranks(ranks, trainer.MEGATRON, np.concatenate)

    def refuse_adapter(self, name: str, wrong: str | None) -> None:
        """Raises BadRequest for an adapter that engines cannot take, and for one under the base model's name (vLLM documentation,
        LoRA Adapters: a request's model is the one or the other)."""
        if wrong is not None:
            raise BadRequest(f"the {wrong} of adapter {name} does not fit")
        if name == MODEL:
            raise BadRequest(f"{name} is the base model's name: no adapter can have it")

    async def load_lora_adapter(self, name: str, version: int) -> None:
        """Only the adapter's factors travel (SkyRL #1014, task 11)."""
        await self.everywhere("add_lora", lora_request=model.Adapter(name, model.adapter(version)))


class RetryingClient(Client):
    """Continues requests that pause(abort) cut short: sends prompt and tokens so far again (SkyRL #1014, task 5)."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        done = await super().row(session, prompt, params, **more)
        while self.cut_short(done):
            done = self.joined(done, await self.again(done, session, params, **more))
        return done

    def cut_short(self, done: Output) -> bool:
        """True if the request has to be sent again."""
        return done.reason == "abort"

    async def again(self, done: Output, session: SessionId | None, params: dict[str, Any], **more: Any) -> Output:
        """Send prompt and tokens so far."""
        left, prior = self.remaining(params, done), len(done.tokens)
        return await super().row(session, done.prompt + done.tokens, left, prior=prior, **more)

    def remaining(self, params: dict[str, Any], done: Output) -> dict[str, Any]:
        """The sampling parameters with the budget reduced by the tokens already generated."""
        made = len(done.tokens)
        left = {"max_tokens": params.get("max_tokens", 16) - made}
        if params.get("min_tokens"):
            left["min_tokens"] = max(0, params["min_tokens"] - made)
        return params | left

    def joined(self, done: Output, again: Output) -> Output:
        """Both parts joined into one answer to the first prompt."""
        again.prompt = done.prompt
        again.tokens = done.tokens + again.tokens
        again.text = done.text + again.text
        if again.logprobs is not None:
            again.logprobs = (done.logprobs or []) + again.logprobs
        return again


def sampling_params(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of an OpenAI body that are sampling parameters."""
    others = {"model", "prompt", "messages", "session_id", "request_id", "return_token_ids", "n"}
    return {name: value for name, value in body.items() if name not in others}


def error_body(message: str, code: int) -> dict[str, Any]:
    """vLLM's ErrorResponse."""
    return {"error": {"message": message, "type": HTTPStatus(code).phrase, "param": None, "code": code}}
