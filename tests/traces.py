"""Recordings made by hand, for tests of checks: builders for each kind of event, and an oracle with settable answers.

Ids and times are assigned in the order of building, so that calls built one after the other do not overlap. `FakeReference` is a
small language model (`next` is a pure function of version and prompt). Tests build a correct recording from it, and damage that to
get a broken one.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from harness.checks.base import Check, Evidence, Finding
from harness.checks.instruments import blind
from harness.contract.capability import Capability
from harness.contract.messages import (
    DetokenizeRequest,
    DetokenizeResult,
    GenerateRequest,
    Generation,
    Message,
    OpenAIRequest,
    OpenAIResponse,
    SampleRequest,
    TokenizeRequest,
    TokenizeResult,
)
from harness.contract.topology import Quantization, Topology
from harness.contract.vocabulary import TINY
from harness.records.recording import Call, CallError, Header, Mark, Observation, ScenarioEnd, ScenarioTrace
from harness.records.reference import (
    METHOD_OF,
    Answer,
    ExpectedDigestsRequest,
    Experts,
    ExpertsRequest,
    Next,
    NextRequest,
    Noise,
    NoiseRequest,
    Query,
    Score,
    ScoreRequest,
    UnansweredQuery,
    Weights,
    key,
)

SPECIAL = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
MODEL = "/models/tiny"
_ids = itertools.count(1)
_clock = itertools.count(1_000, 1_000)


def tick() -> int:
    """A time in nanoseconds, later than all earlier ones."""
    return next(_clock)


def header(**changes: Any) -> Header:
    """A header of a recording of two engines; `changes` replaces any field."""
    fields: dict[str, Any] = {
        "harness_version": "0",
        "run_id": "run",
        "created_at": "2026-01-01T00:00:00Z",
        "target": "miniature",
        "topology": Topology(),
        "start": "fork",
        "engine": "cpu",
        "capabilities": list(Capability),
        "packages": {},
        "model": {"name": MODEL, "sha256": "0" * 64, "dtype": "float32"},
        "hardware": {},
        "seed": 0,
        "servers": ["server-0", "server-1"],
    }
    return Header(**(fields | changes))


def _json(value: Message | dict[str, Any] | None) -> dict[str, Any] | None:
    return msgspec.to_builtins(value) if isinstance(value, Message) else value


def call(
    method: str,
    request: Message | dict[str, Any] | None = None,
    result: Message | dict[str, Any] | None = None,
    *,
    error: CallError | None = None,
    label: str | None = None,
    started_ns: int | None = None,
    ended_ns: int | None = None,
    phase: Literal["clean_room", "scenario"] = "scenario",
) -> Call:
    """One call; by default it starts now and ends a tick later. Without result and error it returned `{}`."""
    started = tick() if started_ns is None else started_ns
    return Call(
        id=next(_ids),
        method=method,
        request=_json(request) or {},
        result=None if error else (_json(result) or {}),
        error=error,
        started_ns=started,
        ended_ns=tick() if ended_ns is None else ended_ns,
        phase=phase,
        label=label,
    )


def error(kind: str = "ValueError", message: str = "not like this", *, status: int | None = None) -> CallError:
    return CallError(kind=kind, message=message, status=status)


def generate(
    prompts: list[list[int]],
    response_ids: list[list[int]] | None = None,
    *,
    stop_reasons: Sequence[str | None] | None = None,
    responses: list[str] | None = None,
    logprobs: list[list[float] | None] | None = None,
    session_ids: list[str | int] | None = None,
    messages: list[list[dict[str, Any]]] | None = None,
    params: dict[str, Any] | None = None,
    lora_adapter: str | None = None,
    experts: list[list[list[list[int]]] | None] | None = None,
    **about: Any,
) -> Call:
    """A generate call. Without `response_ids` it has no result (give `error=`); `messages` replaces `prompts`.

    Texts default to the fake tokenizer's decode of the ids, stop reasons to "length".
    """
    return call(
        "generate",
        GenerateRequest(
            prompt_token_ids=None if messages is not None else prompts,
            prompts=messages,
            sampling_params=params or {},
            session_ids=session_ids,
            lora_adapter=lora_adapter,
        ),
        _generation(response_ids, stop_reasons, responses, logprobs, experts),
        **about,
    )


def sample(
    prompt: list[int],
    response_ids: list[list[int]] | None,
    *,
    num_samples: int | None = None,
    session_id: str | int | None = None,
    stop_reasons: Sequence[str | None] | None = None,
    responses: list[str] | None = None,
    logprobs: list[list[float] | None] | None = None,
    params: dict[str, Any] | None = None,
    **about: Any,
) -> Call:
    """A sample call; `num_samples` defaults to the number of responses."""
    return call(
        "sample",
        SampleRequest(
            prompt_token_ids=prompt,
            num_samples=len(response_ids or ()) if num_samples is None else num_samples,
            sampling_params=params or {},
            session_id=session_id,
        ),
        _generation(response_ids, stop_reasons, responses, logprobs),
        **about,
    )


def _generation(
    response_ids: list[list[int]] | None,
    stop_reasons: Sequence[str | None] | None,
    responses: list[str] | None,
    logprobs: list[list[float] | None] | None,
    experts: list[list[list[list[int]]] | None] | None = None,
) -> Generation | None:
    if response_ids is None:
        return None
    return Generation(
        response_ids=response_ids,
        responses=responses if responses is not None else [decode(ids) for ids in response_ids],
        stop_reasons=list(stop_reasons) if stop_reasons is not None else ["length"] * len(response_ids),
        response_logprobs=logprobs,
        routed_experts=experts,
    )


def openai(method: str, body: dict[str, Any], response: dict[str, Any] | None, **about: Any) -> Call:
    """A completion or chat_completion call with its response body."""
    return call(method, OpenAIRequest(body=body), None if response is None else OpenAIResponse(body=response), **about)


def tokenize(
    texts: list[str], token_ids: list[list[int]] | None, *, add_special_tokens: bool = True, **about: Any
) -> Call:
    return call(
        "tokenize",
        TokenizeRequest(texts=texts, add_special_tokens=add_special_tokens),
        None if token_ids is None else TokenizeResult(token_ids=token_ids),
        **about,
    )


def detokenize(token_ids: list[list[int]], texts: list[str] | None, **about: Any) -> Call:
    return call(
        "detokenize",
        DetokenizeRequest(token_ids=token_ids),
        None if texts is None else DetokenizeResult(texts=texts),
        **about,
    )


def observation(kind: str, server: str = "server-0", at_ns: int | None = None, **data: Any) -> Observation:
    return Observation(kind=kind, server=server, at_ns=tick() if at_ns is None else at_ns, data=data)


def executed(
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    server: str = "server-0",
    request_id: str | None = None,
    parent_id: str | None = None,
    params: dict[str, Any] | None = None,
    reason: str | None = "length",
    from_ns: int | None = None,
    step_ns: int = 1,
    cached_tokens: int = 0,
) -> list[Observation]:
    """A tap's observations of one request: arrival, one step per token, finish (none with `reason=None`: still running)."""
    name = request_id or f"request-{next(_ids)}"
    start = tick() if from_ns is None else from_ns
    seen = [
        observation(
            "request",
            server,
            start,
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=params or {},
            parent_id=parent_id,
        )
    ]
    for number, token in enumerate(tokens, start=1):
        seen.append(observation("step", server, start + number * step_ns, tokens={name: [token]}))
    if reason is not None:
        end = start + (len(tokens) + 1) * step_ns
        ended = {"request_id": name, "reason": reason, "cached_tokens": cached_tokens}
        seen.append(observation("finish", server, end, **ended))
    return seen


def trace(
    *calls: Call,
    observations: Iterable[Observation] = (),
    scenario: str = "module.test_it",
    take: int = 1,
    outcome: Literal["completed", "failed"] = "completed",
    end_error: CallError | None = None,
    marks: Iterable[Mark] = (),
    **header_changes: Any,
) -> ScenarioTrace:
    """The trace of one scenario."""
    return ScenarioTrace(
        header=header(**header_changes),
        scenario=scenario,
        take=take,
        calls=calls,
        observations=tuple(observations),
        end=ScenarioEnd(scenario=scenario, take=take, outcome=outcome, error=end_error, at_ns=tick()),
        marks=tuple(marks),
    )


def judge(
    check: Check,
    *calls: Call,
    observations: Iterable[Observation] = (),
    reference: FakeReference | None = None,
    **about: Any,
) -> Finding | None:
    """Run one check on these calls. It may read only those answers of the oracle that its `queries` announced."""
    recorded = trace(*calls, observations=observations, **about)
    oracle = reference or FakeReference()
    announced: dict[str, Query] = {}
    while True:
        known = len(announced)
        announced |= {key(q): q for q in _asks(check, recorded, oracle.asked(announced.values()))}
        if len(announced) == known:
            break
    evidence = Evidence(recorded, oracle.asked(announced.values()))
    return blind(evidence, check.tap) or check.judge(evidence)


def _asks(check: Check, recorded: ScenarioTrace, book: FakeReference) -> Iterator[Query]:
    """One round of questions: a check may need an answer to know its next one."""
    try:
        yield from check.queries(Evidence(recorded, book))
    except UnansweredQuery:
        return


NOISE = Noise(numbers=1000, largest=5e-5, rms=5e-6, weights=5e-5, router=5e-5)
"""Noise of float32."""


class FakeReference:
    """A `ReferenceBook` over a small made-up model of `vocab_size` tokens and a tokenizer of one character per token.

    `set(query, answer)` fixes the answer to one query. `asked(queries)` is a book that knows only those queries and raises
    `UnansweredQuery` for any other, as the real one does.
    """

    def __init__(self, vocab_size: int = 64, sharpness: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self.sharpness = sharpness
        self._set: dict[str, Answer] = {}
        self._next: dict[tuple[Any, ...], list[float]] = {}
        self._known: set[str] | None = None

    def set(self, query: Query, answer: Answer) -> None:
        self._set[key(query)] = answer

    def asked(self, queries: Iterable[Query]) -> FakeReference:
        """The same oracle, limited to `queries`."""
        book = FakeReference(self.vocab_size, self.sharpness)
        book._set, book._next = self._set, self._next
        book._known = {key(query) for query in queries}
        return book

    def greedy(
        self,
        prompt: list[int],
        length: int,
        *,
        version: int = 0,
        adapter: int | None = None,
        quantization: Quantization | None = None,
    ) -> list[int]:
        """The greedy continuation of `prompt`: for building correct recordings."""
        weights = Weights(version=version, adapter=adapter, quantization=quantization)
        tokens: list[int] = []
        for _ in range(length):
            logprobs = self._distribution(weights, prompt + tokens)
            tokens.append(max(range(self.vocab_size), key=logprobs.__getitem__))
        return tokens

    def drawn(self, prompt: list[int], length: int, *, seed: int, temperature: float = 1.0) -> list[int]:
        """A sampled continuation of `prompt`: for building correct recordings."""
        rng = random.Random(seed)
        tokens: list[int] = []
        for _ in range(length):
            logprobs = self._distribution(Weights(version=0), prompt + tokens)
            tokens.append(rng.choices(range(self.vocab_size), [math.exp(x / temperature) for x in logprobs])[0])
        return tokens

    def logprobs(
        self, prompt: list[int], tokens: list[int], *, version: int = 0, quantization: Quantization | None = None
    ) -> list[float]:
        """Log-probabilities of `tokens` after `prompt`: for building correct recordings."""
        return self._score(Weights(version=version, quantization=quantization), prompt, tokens).logprobs

    def score(self, request: ScoreRequest) -> Score:
        found = self._set.get(self._known_name(request))
        if isinstance(found, Score):
            return found
        if request.cached:
            return self._score(
                Weights(version=on_cache(request.version, request.cached)), request.prompt, request.tokens
            )
        return self._score(request, request.prompt, request.tokens)

    def next(self, request: NextRequest) -> Next:
        found = self._set.get(self._known_name(request))
        return found if isinstance(found, Next) else Next(logprobs=self._distribution(request, request.prompt))

    def experts(self, request: ExpertsRequest) -> Experts:
        found = self._set.get(self._known_name(request))
        return found if isinstance(found, Experts) else self._experts(request)

    def routed(self, tokens: list[int], *, version: int = 0) -> list[list[list[int]]]:
        """Positions × layers × top_k of the made-up model: for building correct recordings."""
        return self._experts(ExpertsRequest(version=version, tokens=tokens)).indices

    def _experts(self, request: ExpertsRequest) -> Experts:
        """Two layers, each with two of eight experts: a function of version, adapter and the tokens so far."""
        indices = []
        for position in range(1, len(request.tokens) + 1):
            rng = random.Random(f"{request.version} {request.adapter} {request.tokens[:position]}")
            indices.append([rng.sample(range(8), 2) for _ in range(2)])
        return Experts(indices=indices, margins=[[1.0, 1.0] for _ in indices], count=8)

    def expected_digests(self, request: ExpectedDigestsRequest) -> dict[str, str]:
        found = self._set.get(key(request))
        if found is not None:
            return found.digests  # type: ignore[union-attr]
        return {"weight": f"{request.version:08x}:2x2:{request.quantization or 'float32'}"}

    def noise(self, request: NoiseRequest) -> Noise:
        found = self._set.get(key(request))
        return found if isinstance(found, Noise) else NOISE

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        asked = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        found = self._set.get(self._name("render", **asked))
        if found is not None:
            return list(found.tokens)  # type: ignore[union-attr]
        return encode(TINY.rendered(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        found = self._set.get(self._name("decode", tokens=tokens, skip_special_tokens=skip_special_tokens))
        return found.text if found is not None else decode(tokens, skip_special_tokens=skip_special_tokens)  # type: ignore[union-attr]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        found = self._set.get(self._name("encode", text=text, add_special_tokens=add_special_tokens))
        return list(found.tokens) if found is not None else encode(text)  # type: ignore[union-attr]

    def _name(self, method: str, **fields: Any) -> str:
        kinds = {name: kind for kind, name in METHOD_OF.items()}
        return self._known_name(kinds[method](**fields))

    def _known_name(self, query: Any) -> str:
        name = key(query)
        if self._known is not None and name not in self._known:
            raise UnansweredQuery(f"this was not asked: {query}")
        return name

    def _distribution(self, weights: Weights, prompt: Sequence[int]) -> list[float]:
        """An adapter gives another distribution; quantization moves each logit a little."""
        base = (
            (weights.version, tuple(prompt)) if weights.adapter is None else (weights.adapter, weights.version, *prompt)
        )
        at = (weights.quantization, base)
        if at not in self._next:
            rng = random.Random(hashlib.sha256(repr(base).encode()).digest())
            logits = [rng.gauss(0.0, self.sharpness) for _ in range(self.vocab_size)]
            if weights.quantization is not None:
                logits = [x + rng.gauss(0.0, 0.05) for x in logits]
            total = math.log(math.fsum(math.exp(x) for x in logits))
            self._next[at] = [x - total for x in logits]
        return self._next[at]

    def _score(self, weights: Weights, prompt: list[int], tokens: list[int]) -> Score:
        logprobs, ranks, margins = [], [], []
        for position, token in enumerate(tokens):
            row = self._distribution(weights, [*prompt, *tokens[:position]])
            logprobs.append(row[token])
            ranks.append(sum(x > row[token] for x in row))
            first, second = sorted(row, reverse=True)[:2]
            margins.append(first - second)
        return Score(logprobs=logprobs, ranks=ranks, margins=margins)


def on_cache(version: int, cached: Iterable[tuple[int, int]]) -> int:
    """The separate version that `FakeReference` uses for a version that reads the keys and values of others."""
    return version + 1000 * sum(tokens * (other + 1) for tokens, other in cached)


def decode(tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """One character per token, "!" to "~" for 3 to 96 as in the tiny models; special tokens by name or omitted."""
    return "".join(("" if skip_special_tokens else SPECIAL[t]) if t in SPECIAL else chr(t + _shift(t)) for t in tokens)


def _shift(token: int) -> int:
    """Token id → code point: printable ASCII first, an unused plane for other ids, then all other characters."""
    return 30 if token < 97 else 0x10000 if token < 1000 else -1000


def _token(character: str) -> int:
    point = ord(character)
    if 33 <= point < 127:
        return point - 30
    return point - 0x10000 if 0x10000 + 97 <= point < 0x10000 + 1000 else point + 1000


def encode(text: str) -> list[int]:
    """The inverse of `decode(…, skip_special_tokens=False)`."""
    tokens: list[int] = []
    while text:
        for token, name in SPECIAL.items():
            if text.startswith(name):
                tokens.append(token)
                text = text.removeprefix(name)
                break
        else:
            tokens.append(_token(text[0]))
            text = text[1:]
    return tokens


def render(messages: list[dict[str, str]]) -> list[int]:
    """The tiny model's chat template, with the generation prompt."""
    return encode(TINY.rendered(messages))
