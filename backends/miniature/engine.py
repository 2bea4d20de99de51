"""One server of the miniature: continuous batching, prefix cache, pause modes, sleep, weights, adapters, and its tap.

A step makes one token for every running request and takes `STEP_S` of the loop's time. The tap records
`harness.records.recording.Observation`s, as the tap of a real engine does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from backends.miniature import deltas, model, parameters, tokenizer
from backends.miniature.tokenizer import EOS
from harness.contract.clock import now_ns
from harness.contract.delays import delay_s
from harness.contract.messages import ENGINE_PLACES, Dtype, PauseMode, Scalar
from harness.records.reference import ExpertShard

STEP_S = 0.001
"""Duration of a step (seconds), on the loop's clock."""
BLOCK = 128
"""Tokens per block of the prefix cache, as in vLLM's CPU engine."""
MOST_PREFILLED = 1024
"""A step takes no more new requests once it has taken this many of their tokens."""

DEVICE_BYTES = 2**36
"""Memory of a simulated device. Workers of several servers may share it."""
CACHE_BYTES = 2**30
"""Size of a worker's KV cache on the device: far more than its weights, as for a tiny model on a real engine."""
OPTIONS: dict[str, Scalar] = {
    "block_size": BLOCK,
    "max_num_seqs": 64,
    "enable_prefix_caching": True,
    "scheduling_policy": "fcfs",
}
"""Options of an engine that the configuration has no key for, with their defaults."""

TAGS = frozenset({"weights", "kv_cache"})
"""Memory that sleep releases and wake_up takes back (vLLM sleep mode)."""

PENALTIES = ("presence_penalty", "frequency_penalty")
RESHAPING = ("logit_bias", "allowed_token_ids", "min_tokens", *PENALTIES)
"""Sampling parameters under which the most probable token is not always the greedy one."""

CacheKey = tuple[Any, ...]
"""(number of the adapter's loading, 0 for the base model; the tokens; the salt if there is one)."""


class BadRequest(ValueError):
    """The caller made a mistake."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.status = 400


class EngineDead(ConnectionError):
    """The server has died."""

    status = 503


class Output:
    """The answer to a request."""

    def __init__(self, request: Request, text: str) -> None:
        self.prompt = request.prompt
        self.tokens = list(request.tokens)
        self.text = text
        self.reason = request.reason
        self.logprobs: list[float] | None = list(request.logprobs) if request.wants_logprobs else None
        self.experts: list[list[list[int]]] = [list(position) for position in request.experts]


class Request:
    """One request in an engine. `prior` is the number of tokens at the prompt's end that an earlier attempt generated."""

    def __init__(
        self,
        number: str,
        prompt: list[int],
        params: dict[str, Any],
        *,
        adapter: str | None,
        prior: int,
        salt: str | None = None,
    ) -> None:
        self.id = number
        self.prompt = list(prompt)
        self.params = dict(params)
        self.adapter = adapter
        self.salt = salt
        self.prior = prior
        self.random = random.Random(f"{params.get('seed')} {prompt}")
        """The request's own random sequence, used if it has a seed."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.processed: float | None = None
        """Log-probability of the last token after temperature and filters; None if neither was applied."""
        self.experts: list[list[list[int]]] = []
        self.reason: Literal["stop", "length", "abort"] | None = None
        self.node: model.Node | None = None
        """The network's node after all tokens so far; None until they are fed, or if they must be fed again."""
        self.rounded: tuple[model.Node, NDArray[np.float64]] | None = None
        """In 16 bits: the last node whose row was computed, and the row."""
        self.cached_tokens: int | None = None
        """Tokens of the prompt that came from the prefix cache when it was first read."""
        self.shaped = False
        """True once the answer is all that its shape allows."""
        self.done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

    @property
    def wants_logprobs(self) -> bool:
        return self.params.get("logprobs") is not None

    @property
    def context(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def answer(self) -> list[int]:
        """All tokens that the caller will see, including those from before an interruption."""
        return self.prompt[len(self.prompt) - self.prior :] + self.tokens


def _shown(value: Any) -> Any:
    """An argument of a control call as the tap records it."""
    if isinstance(value, model.Adapter):
        return value.shown
    return value if isinstance(value, str | int | float | bool | list | None) else "…"


class Engine:
    """One server. Every promise that a fault could break has its own method."""

    key = ""
    """What an OpenAI-style request must come with; empty if any may come."""
    kept_adapters = 1
    """Adapters that it keeps, in use or not."""
    first_space = True
    """False: its tokenizer leaves out a space at the beginning of a text."""
    cache_tokens = 1 << 20
    """Tokens of running requests for which it has room."""
    processed = False
    """True if log-probabilities are those after temperature and filters (vLLM, logprobs_mode)."""
    checkpoint: dict[str, model.Array]
    """What it loads from in syncs by a shared disk, from when a trainer joins."""

    def __init__(
        self,
        name: str,
        *,
        max_model_len: int,
        quantization: str | None,
        seed: int,
        dtype: Dtype = "float32",
        workers: Sequence[ExpertShard | None] = (None,),
    ) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self.quantization = quantization
        self.workers = workers
        """Each tensor-parallel worker's share of the experts. None: it splits experts like all other parameters."""
        self.seen: list[dict[str, Any]] = []
        self.fired = 0
        self.places = ENGINE_PLACES
        """Most requests that run at once; others wait."""
        self.dead = False
        self.crash: str | None = None
        """Why the whole stack is down: a process that it needs died. None while it runs."""
        self.asleep: set[str] = set()
        self.frozen = False
        self.closed = False
        self.made = 0
        """Tokens since the start."""
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.held: list[Request] = []
        self.adapters: dict[str, tuple[int, model.Parameters]] = {}
        self.folders: dict[str, model.Parameters | None] = {}
        """What the trainer wrote last to each adapter's folder, loaded or not. None: it has written half."""
        self.cache: dict[CacheKey, tuple[model.Node, list[list[list[int]]]]] = {}
        self.schedule: int | None = None
        """Seed of the adverse schedule under which messages arrive; None if none is delayed."""
        self._messages = itertools.count()
        self._requests = itertools.count(1)
        self._loads = itertools.count(1)
        self._free = random.Random(f"{name} {seed}")
        self._dice = None if dtype == "float32" else np.random.default_rng([seed, *name.encode()])
        """In 16 bits: how each step rounds. The same context rounds otherwise in the next one, as beside another batch."""
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._networks: dict[int, model.Network] = {}
        self._staged: dict[str, model.Array] | None = None
        self.extensions: list[str] = []
        """Classes with which the stack extended the worker's class."""
        self.transport: Literal["broadcast", "ipc"] = "broadcast"
        self.settings: dict[str, str] = {}
        self.version = 0
        self.syncs = 0
        self.weight_label = "default"
        """Name of the weights that it holds."""
        self.shards: list[model.Parameters] = []
        """Each worker's parameters, by rank."""
        self.held_parameters: dict[str, model.Array] = {}
        """The shards joined: the parameters that answers are computed with."""
        self.hold(model.quantize(model.policy(0), quantization))
        self._loop = asyncio.create_task(self._run())

    # --- the tap

    def tell(self, kind: str, **data: Any) -> None:
        self.seen.append({"kind": kind, "server": self.name, "at_ns": now_ns(), "data": data})

    @final
    def follow(self, schedule: int | None) -> None:
        """Delay messages by the schedule of this seed from its beginning on; None: no longer."""
        self.schedule, self._messages = schedule, itertools.count()

    @final
    async def late(self, what: str) -> None:
        """Let a message wait for its turn under an adverse schedule."""
        if self.schedule is not None:
            seconds = delay_s(self.schedule, self.name, next(self._messages))
            await asyncio.sleep(seconds)
            self.tell("delay", what=what, seconds=seconds)

    async def control(self, op: str, **arguments: Any) -> None:
        """Execute a control call, and record it with its arguments, its end and its error."""
        await self.late(op)
        if self.dead:
            raise EngineDead(f"{self.name} is dead")
        at_ns, error = now_ns(), None
        try:
            await getattr(self, op)(**arguments)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            shown = {name: _shown(value) for name, value in arguments.items()}
            data = {"op": op, "arguments": shown, "ended_ns": now_ns(), "error": error}
            self.seen.append({"kind": "control", "server": self.name, "at_ns": at_ns, "data": data})

    # --- requests

    async def generate(
        self,
        prompt: list[int],
        params: dict[str, Any],
        *,
        adapter: str | None = None,
        prior: int = 0,
        salt: str | None = None,
    ) -> Output:
        """One request, from its arrival to its end. Raises BadRequest and EngineDead."""
        await self.late("request")
        if self.dead:
            raise EngineDead(f"{self.name} is dead")
        try:
            self.refuse_wrong(prompt, params, adapter)
        except BadRequest:
            self.tell("refusal", method="POST", path="/generate", status=400)
            raise
        params = parameters.settled(params)
        number = f"{self.name}-{next(self._requests)}"
        request = Request(number, prompt, params, adapter=adapter, prior=prior, salt=salt)
        self.tell(
            "request",
            request_id=request.id,
            prompt_token_ids=request.prompt,
            sampling_params=self.effective(request),
            parent_id=None,
            cache_salt=salt,
        )
        self.arrive(request)
        self._poke()
        try:
            return await request.done
        except asyncio.CancelledError:
            self.drop(request)
            raise

    def refuse_wrong(self, prompt: list[int], params: dict[str, Any], adapter: str | None) -> None:
        """Raises BadRequest for a request that the engine cannot answer."""
        if not prompt:
            raise BadRequest("a prompt cannot be empty")
        if len(prompt) >= self.max_model_len:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens, more than the maximum context length of {self.max_model_len} allows"
            )
        if any(not isinstance(token, int) or not 0 <= token < model.VOCABULARY for token in prompt):
            raise BadRequest("the prompt has a token that is not in the vocabulary")
        if said := parameters.wrong(params):
            raise self.refusal(said, params)
        if adapter is not None:
            self.refuse_unknown(adapter)

    def refusal(self, said: str, _params: dict[str, Any]) -> Exception:
        """The error for wrong sampling parameters."""
        return BadRequest(said)

    def refuse_unknown(self, adapter: str) -> None:
        """Raises BadRequest for an adapter that is not loaded."""
        if adapter not in self.adapters:
            raise BadRequest(f"there is no adapter {adapter}")

    def effective(self, request: Request) -> dict[str, Any]:
        """The sampling parameters that take effect."""
        return dict(request.params)

    def arrive(self, request: Request) -> None:
        """Queue a new request; during a pause, hold it until resume."""
        (self.held if self.closed else self.waiting).append(request)

    @property
    def unanswered(self) -> list[Request]:
        """Every request that it runs, or that waits or is held."""
        return [*self.running, *self.waiting, *self.held]

    def drop(self, request: Request) -> None:
        """Remove a request whose caller is gone."""
        for queue in (self.running, self.waiting, self.held):
            if request in queue:
                queue.remove(request)
        self.tell("abort", request_ids=[request.id])

    # --- the loop

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            try:
                self.step()
            except Exception as e:  # noqa: BLE001 - after any error, waiting callers must learn that the engine died
                self.die(e)
                return
            await asyncio.sleep(self.step_s())
            self._poke()

    def step_s(self) -> float:
        return STEP_S

    def _poke(self) -> None:
        busy = bool(self.running or self.waiting)
        (self._work.set if busy and not self.frozen and self.may_run() and not self.dead else self._work.clear)()
        (self._idle.clear if busy else self._idle.set)()

    def may_run(self) -> bool:
        """False while anything sleeps (vLLM #44483)."""
        return not self.asleep

    def step(self) -> None:
        """One token for every running request."""
        prefilled = 0
        self.make_room()
        while (
            self.waiting
            and len(self.running) < self.places
            and prefilled < MOST_PREFILLED
            and self.has_room(self.waiting[0])
        ):
            prefilled += len(self.waiting[0].context)
            self.running.append(self.waiting.pop(0))
        self.feed()
        made = {}
        for request in self.running:
            assert request.node is not None
            token = self.choose(request)
            made[request.id] = [token]
            if request.wants_logprobs:
                request.logprobs.append(self.logprob(request, token))
            request.experts.append(self.routed(request.node.experts))
            request.tokens.append(token)
            request.reason = self.ended(request)
        if made:
            self.made += len(made)
            self.tell("step", tokens=made)
        for request in [r for r in self.running if r.reason is not None]:
            self.running.remove(request)
            self.finish(request)

    def taken(self, requests: Sequence[Request]) -> int:
        """Tokens of whole blocks that these requests fill with their next token."""
        return sum(-(-(len(request.context) + 1) // BLOCK) * BLOCK for request in requests)

    def has_room(self, request: Request) -> bool:
        return not self.running or self.taken([*self.running, request]) <= self.cache_tokens

    def make_room(self) -> None:
        """Preempt the requests that came last until the others have room (vLLM documentation, Preemption)."""
        while len(self.running) > 1 and self.taken(self.running) > self.cache_tokens:
            last = self.running.pop()
            last.node, last.experts = None, []
            self.preempt(last)

    def preempt(self, request: Request) -> None:
        """A preempted request is the next to run again."""
        self.waiting.insert(0, request)

    def feed(self) -> None:
        """Feed each running request's newest token into the network, or all of its tokens if it has no node."""
        nodes: dict[model.Network, list[model.Node]] = {}
        for request in self.running:
            network = self.network(request.adapter)
            if request.node is None:
                request.node = self.prefill(request, network)
            else:
                request.node = network.feed(network.adopt(request.node), request.tokens[-1])
            nodes.setdefault(network, []).append(request.node)
        for network, together in nodes.items():
            network.look(together)

    def prefill(self, request: Request, network: model.Network) -> model.Node:
        """Feed the request's tokens from the end of the cached prefix on."""
        tokens = request.context
        node, experts = self.cached(request, network)
        if request.cached_tokens is None:
            request.cached_tokens = node.position
        fed = []
        for token in tokens[node.position :]:
            node = network.feed(node, token)
            fed.append(node)
        network.route(fed)
        request.experts = [*experts, *(self.routed(n.experts) for n in fed[:-1])]
        for known in fed:
            if known.position % BLOCK == 0:
                self.remember(request, tokens[: known.position], known)
        return node

    def routed(self, chosen: list[list[int]]) -> list[list[int]]:
        """The experts of one position as the engine reports them: layers × top_k."""
        return chosen

    # --- prefix cache

    def cache_key(self, adapter: str | None, tokens: list[int]) -> CacheKey:
        """Requests with the same first tokens under the same weights share states."""
        return (self.loading(adapter), tuple(tokens))

    def salted(self, request: Request, tokens: list[int]) -> CacheKey:
        """The key of a request's own blocks (vLLM documentation, Automatic Prefix Caching: the salt is part of the hash)."""
        key = self.cache_key(request.adapter, tokens)
        return key if request.salt is None else (*key, request.salt)

    def cached(self, request: Request, network: model.Network) -> tuple[model.Node, list[list[list[int]]]]:
        """The node and the experts of a request's longest cached prefix, which leaves at least one token to feed."""
        tokens = request.context
        for length in range((len(tokens) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            found = self.cache.get(self.salted(request, tokens[:length]))
            if found is not None:
                return network.adopt(found[0]), found[1][: found[0].position]
        return network.root, []

    def remember(self, request: Request, tokens: list[int], node: model.Node) -> None:
        self.cache[self.salted(request, tokens)] = (node, request.experts[: node.position])

    def forget(self) -> None:
        """Drop the prefix cache."""
        self.cache.clear()

    # --- sampling

    def choose(self, request: Request) -> int:
        """The next token of a request under its sampling parameters (vLLM documentation, SamplingParams)."""
        assert request.node is not None
        params, request.processed = request.params, None
        if (shape := self.in_shape(params.get("response_format") or params.get("structured_outputs"))) is not None:
            rest = [*tokenizer.VOCABULARY.spelled(shape), tokenizer.EOS][len(request.tokens) :]
            request.shaped = len(rest) == 1
            return rest[0] if rest else self.beyond_the_shape(request)
        if self._dice is None and params.get("temperature", 1.0) == 0 and not any(map(params.get, RESHAPING)):
            return request.node.best
        row = self.row(request)
        for token, bias in (params.get("logit_bias") or {}).items():
            row[int(token)] += bias
        for token, times in Counter(request.answer).items() if any(map(params.get, PENALTIES)) else ():
            row[token] -= (params.get("presence_penalty") or 0) + times * (params.get("frequency_penalty") or 0)
        if params.get("allowed_token_ids"):
            allowed = list(params["allowed_token_ids"])
            others, row = row, np.full_like(row, -np.inf)
            row[allowed] = others[allowed]
        if len(request.tokens) < (params.get("min_tokens") or 0):
            row[list(self.stops(request))] = -np.inf
        temperature = params.get("temperature", 1.0)
        if temperature == 0:
            best = int(row.argmax())
            request.processed = float(-np.log(np.exp(row - row[best]).sum()))
            return best
        return self.draw(request, row / temperature)

    def in_shape(self, response_format: Any) -> str | None:
        """The one answer that a response format allows; None if it allows any."""
        return parameters.in_shape(response_format)

    def draw(self, request: Request, row: Any) -> int:
        """A random token from those that top_k, top_p and min_p leave."""
        params = request.params
        order = np.argsort(-row, kind="stable")
        weights = np.exp(row[order] - row[order[0]])
        weights /= weights.sum()
        kept = weights
        if (top_k := params.get("top_k") or 0) > 0:
            kept = np.where(np.arange(len(row)) < top_k, kept, 0)
        if min_p := params.get("min_p"):
            kept = np.where(weights >= min_p * weights[0], kept, 0)
        if (top_p := params.get("top_p", 1.0)) < 1:
            left = kept / kept.sum()
            kept = np.where(np.cumsum(left) - left < top_p, kept, 0)
        at = np.searchsorted(np.cumsum(kept), self.chance(request) * kept.sum(), side="right")
        at = min(int(at), len(order) - 1)
        request.processed = float(np.log(kept[at] / kept.sum()))
        return int(order[at])

    def chance(self, request: Request) -> float:
        """A random number in [0, 1), from the request's own sequence if it has a seed."""
        return (self._free if request.params.get("seed") is None else request.random).random()

    def logprob(self, request: Request, token: int) -> float:
        """The log-probability of a chosen token, at temperature 1 (vLLM: logprobs are of the raw logits), unless the engine is
        configured to give it after temperature and filters."""
        assert request.node is not None
        if self.processed and request.processed is not None:
            return min(0.0, request.processed)
        if self._dice is None and token == request.node.best:
            return min(0.0, request.node.logprob)
        return min(0.0, float(self.row(request)[token]))

    def row(self, request: Request) -> NDArray[np.float64]:
        """A copy of the log-probabilities of a request's next token, by token id (vocabulary)."""
        assert request.node is not None
        row = np.array(request.node.network.row(request.node), dtype=np.float64)
        if self._dice is None:
            return row
        if request.rounded is None or request.rounded[0] is not request.node:
            request.rounded = request.node, model.rounded(row, self._dice)
        return request.rounded[1].copy()

    def prompt_rows(self, prompt: list[int]) -> list[model.Array]:
        """Log-probabilities of the token after each position of a prompt but the last, by token id (vocabulary)."""
        network = self.network(None)
        nodes = itertools.accumulate(prompt[:-1], network.feed, initial=network.root)
        rows = [network.row(node) for node in itertools.islice(nodes, 1, None)]
        return rows if self._dice is None else [model.rounded(row, self._dice) for row in rows]

    def stops(self, request: Request) -> set[int]:
        return set(request.params.get("stop_token_ids") or ()) | (set() if request.params.get("ignore_eos") else {EOS})

    def beyond_the_shape(self, _request: Request) -> int:
        """A token after the last one that the shape allows: there is none."""
        raise RuntimeError("an answer in a shape went on after its end")

    def ended(self, request: Request) -> Literal["stop", "length"] | None:
        """Why a request ends after its last token; None if it does not end."""
        if request.shaped:
            return self.ends_in_shape(request)
        params, answer = request.params, request.answer
        if len(request.tokens) >= (params.get("min_tokens") or 0):
            if answer[-1] in self.stops(request):
                return "stop"
            if self.stop_string(request) is not None:
                return "stop"
        if len(request.tokens) >= params.get("max_tokens", 16) or len(request.context) >= self.max_model_len:
            return "length"
        return None

    def ends_in_shape(self, _request: Request) -> Literal["stop"] | None:
        """Why an answer ends of which the last token is the only one that its shape allowed, and ends it."""
        return "stop"

    def stop_string(self, request: Request) -> str | None:
        """The stop string that the text contains; None if it contains none."""
        stop = request.params.get("stop")
        if not stop:
            return None
        text = self.decode(request, request.answer)
        return self.first([s for s in ([stop] if isinstance(stop, str) else stop) if s in text], text)

    def first(self, found: list[str], text: str) -> str | None:
        """The stop string that ends first in the text; None if it has none (vLLM #49391)."""
        return min(found, key=lambda s: text.index(s) + len(s), default=None)

    # --- the end of a request

    def finish(self, request: Request) -> None:
        """End a request: record its reason and answer its caller."""
        self.tell("finish", request_id=request.id, reason=request.reason, cached_tokens=request.cached_tokens)
        if not request.done.done():
            request.done.set_result(self.output(request))

    def output(self, request: Request) -> Output:
        return Output(request, self.text(request))

    def text(self, request: Request) -> str:
        """The decoded tokens, cut at a stop string (vLLM documentation, include_stop_str_in_output)."""
        text = self.decode(request, request.tokens)
        met = self.stop_string(request) if request.reason == "stop" else None
        if met is None or met not in text:
            return text
        return text[: text.index(met) + (len(met) if request.params.get("include_stop_str_in_output") else 0)]

    def decode(self, request: Request, tokens: list[int]) -> str:
        skip = request.params.get("skip_special_tokens", True)
        return tokenizer.decode(tokens, skip_special_tokens=skip, first_space=self.first_space)

    # --- control plane

    async def pause_generation(self, *, mode: PauseMode, clear_cache: bool) -> None:
        """vLLM documentation, /pause: keep freezes requests, abort ends them, wait lets them finish. New requests wait."""
        self.closed = True
        if mode == "abort":
            self.abort_all()
        elif mode == "wait":
            self._poke()
            await self._idle.wait()
        self.frozen = True
        if clear_cache:
            self.forget()
            self.recompute()
        self._poke()

    def abort_all(self) -> None:
        """End every running and waiting request with its tokens so far."""
        for request in [*self.running, *self.waiting]:
            request.reason = "abort"
            self.finish(request)
        self.running, self.waiting = [], []

    def recompute(self) -> None:
        """Make running requests feed all their tokens again before they continue."""
        for request in self.running:
            request.node, request.experts = None, []

    async def resume_generation(self) -> None:
        for request in self.running if self.frozen else ():
            self.thaw(request)
        self.frozen = self.closed = False
        self.waiting += self.held
        self.held = []
        self._poke()

    def thaw(self, request: Request) -> None:
        """A frozen request goes on as it is."""

    async def sleep(self, *, level: int, tags: list[str] | None = None) -> None:
        """vLLM documentation, Sleep Mode: ends all requests, drops the cache, and at level 2 the weights too. `tags`: only these."""
        self.abort_all()
        self._poke()
        self.asleep |= TAGS if tags is None else set(tags)
        self.forget()
        if level == 2 and "weights" in self.asleep:
            self.hold({name: np.zeros_like(tensor) for name, tensor in self.held_parameters.items()})

    async def wake_up(self, *, tags: list[str] | None) -> None:
        self.asleep -= TAGS if tags is None else set(tags)
        self._poke()

    def pool(self, rank: int) -> dict[str, int]:
        """tag → bytes that one worker releases when it sleeps."""
        return {"weights": sum(tensor.nbytes for tensor in self.shards[rank].values()), "kv_cache": CACHE_BYTES}

    def mapped(self) -> frozenset[str]:
        """Tags whose memory is on the device now."""
        return TAGS - self.asleep

    def in_use(self, rank: int) -> int:
        """Bytes that one worker uses on its device now."""
        mapped = self.mapped()
        return sum(size for tag, size in self.pool(rank).items() if tag in mapped)

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.forget()
        if reset_running_requests:
            self.recompute()

    # --- weights

    def placed(self, *, colocated: bool) -> None:
        """Set the transport: colocated engines read weights from the trainer's memory (IPC), others get a broadcast."""
        self.transport = "ipc" if colocated else "broadcast"

    def configure(self, settings: Mapping[str, str]) -> None:
        """Take the stack's settings."""
        self.settings = dict(settings)

    def arguments(self, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """What an engine would be started with: the settings, its own defaults, and these options. Raises TypeError for an option that
        it does not have, or that the settings name."""
        told = {name: int(value) if value.isdigit() else value for name, value in self.settings.items()}
        known = {**OPTIONS, **told}
        if strange := sorted(options.keys() - known.keys()):
            raise TypeError(f"an engine has no option {', '.join(strange)}")
        if twice := sorted(options.keys() & self.settings.keys()):
            raise TypeError(f"the configuration has a key for {', '.join(twice)}")
        return {**known, **options}

    def hold(self, held: model.Parameters) -> None:
        """Replace the engine's parameters."""
        alone = len(self.workers) == 1 and self.workers[0] is None
        self.shards = [model.shard(held, 1, 0)] if alone else self.scatter(held)
        self.held_parameters = dict(model.joined(self.shards, held, spread=self.workers[0] is not None))
        self._networks.clear()

    def scatter(self, held: model.Parameters) -> list[model.Parameters]:
        """The shard of each of several workers, by rank, or of one worker that has a share of the experts."""
        return [model.shard(held, len(self.workers), rank, share) for rank, share in enumerate(self.workers)]

    def loading(self, adapter: str | None) -> int:
        """Number of the loading that answers under this adapter's name; 0 is the base model."""
        return 0 if adapter is None else self.adapters[adapter][0]

    def network(self, adapter: str | None) -> model.Network:
        """The network for requests under this adapter."""
        return self._network(0, None) if adapter is None else self.adapted(adapter)

    def adapted(self, adapter: str) -> model.Network:
        """The network with this adapter."""
        return self._network(self.loading(adapter), self.adapters[adapter][1])

    def _network(self, loading: int, factors: model.Parameters | None) -> model.Network:
        if loading not in self._networks:
            parameters = model.with_adapter(model.dequantize(self.held_parameters), factors)
            self._networks[loading] = model.network(parameters)
        return self._networks[loading]

    async def start_weight_update(self) -> None:
        """Begin a sync, and discard the chunks of an abandoned one."""
        self._staged = {}

    async def update_weights(self, *, names: list[str], tensors: dict[str, model.Array]) -> None:
        """Stage one chunk of a sync until the last one has arrived. Only the tensors under `names` count. Raises BadRequest for a
        tensor that the model does not have, or has in another shape."""
        assert self._staged is not None, "start_weight_update comes first"
        for name, tensor in tensors.items():
            if not self.fits(name, tensor):
                raise BadRequest(f"no parameter {name} of shape {tensor.shape}")
        self._staged.update({name: tensors[name] for name in names})

    async def load_delta_weights(self, *, delta: dict[str, model.Array]) -> None:
        """One chunk of a sync by a shared disk: change the checkpoint, and load what has changed."""
        changed = {name: deltas.applied(self.checkpoint[name], bits) for name, bits in delta.items()}
        self.checkpoint.update(changed)
        await self.update_weights(names=list(changed), tensors=changed)

    def fits(self, name: str, tensor: model.Array) -> bool:
        """True if the model has a parameter of this name and shape."""
        held = self.held_parameters.get(name)
        return held is not None and held.shape == tensor.shape

    async def finish_weight_update(self) -> None:
        """All chunks have arrived: make them the weights."""
        assert self._staged is not None, "start_weight_update comes first"
        staged, self._staged = self._staged, None
        self.syncs += 1
        self.hold({**self.held_parameters, **self.quantized(staged)})

    def name_weights(self, label: str | None) -> None:
        """Name the weights of the last sync (vLLM 0.30, update_weight_version). Without a label they get one of their own."""
        self.weight_label = label or f"sync {self.syncs}"

    def quantized(self, tensors: dict[str, model.Array]) -> model.Parameters:
        return model.quantize(tensors, self.quantization)

    async def add_lora(self, *, lora_request: model.Adapter) -> None:
        """vLLM documentation, LoRA Adapters: the adapter answers under its name, and replaces an earlier one of that name."""
        self.adapters[lora_request.name] = (next(self._loads), lora_request.factors)
        self.folders[lora_request.name] = lora_request.factors

    async def remove_lora(self, *, name: str) -> None:
        """vLLM documentation, /v1/unload_lora_adapter. Raises BadRequest for a name that is not loaded."""
        if self.adapters.pop(name, None) is None:
            raise BadRequest(f"there is no adapter {name} to unload")

    # --- its end

    def kill(self) -> None:
        """Kill the server, as SIGKILL to its processes does."""
        self._loop.cancel()
        self.die(None)

    def die(self, cause: Exception | None) -> None:
        """Mark the server dead and raise EngineDead in every pending request."""
        self.dead = True
        why = "" if cause is None else f": {type(cause).__name__}: {cause}"
        for request in self.unanswered:
            if not request.done.done():
                request.done.set_exception(EngineDead(f"{self.name} died{why}"))
        self.running, self.waiting, self.held = [], [], []

    def cut_off(self) -> None:
        """End every connection to a caller: its request is dropped, and the caller learns that the router is gone."""
        for request in self.unanswered:
            self.drop(request)
            if not request.done.done():
                request.done.set_exception(EngineDead("the router died"))

    @final
    def stop(self) -> None:
        """End the server's loop in an orderly way."""
        self._loop.cancel()
