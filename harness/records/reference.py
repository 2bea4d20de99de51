"""The oracle's queries and answers. The driver asks after a scenario and keeps the answers beside the recordings.

The oracle itself (`backends/oracle/reference.py`) runs in its own host: Hugging Face forward pass, full context each
step, float32. It shares no code with the adapters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from harness.contract.messages import Message
from harness.contract.topology import Quantization

Routed = list[list[list[int]]]
"""Positions × layers × top_k: the experts that each token was routed to, the most probable one first."""

WIDER = 2.0
"""A bound is this many times the largest rounding error that was measured."""


class Weights(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Base of queries about a model: policy version `version`, with version `adapter` of the LoRA adapter if there is
    one, in the format `quantization` if the engines quantize."""

    version: int
    adapter: int | None = None
    quantization: Quantization | None = None


class ScoreRequest(Weights, frozen=True, kw_only=True, omit_defaults=True):
    """Teacher-forced scores of `tokens` after `prompt`.

    `cached` is a cache that outlived its weights: (number of tokens, policy version that read them), from the first token on, at
    most all but the last of `prompt`. The reference uses these keys and values and computes the rest under `version`.
    """

    prompt: list[int]
    tokens: list[int]
    cached: tuple[tuple[int, int], ...] = ()
    routed: Routed = msgspec.field(default_factory=list)
    """The experts that an engine reports for `prompt` and `tokens` without the last one. The reference takes them where its own
    router has a near tie, and its own choice elsewhere. Later scores are then comparable, as after a near tie of a token."""


class Score(Message, frozen=True, kw_only=True):
    """One entry per token. `ranks` counts tokens with a higher probability (0: the greedy choice).

    `margins` is the log-probability of the most probable token minus that of the runner-up, at each position: how
    far a near tie is away. `logprobs` are at temperature 1.
    """

    logprobs: list[float]
    ranks: list[int]
    margins: list[float]
    behind: tuple[float, ...] = ()
    """Nats by which each token is less probable than the most probable one; 0 for the greedy choice."""
    rounding: tuple[float, ...] = ()
    """How far rounding moves the log-probability of each token in this answer, in nats. Empty where the noise that was measured
    in advance (`Noise`) decides: mostly in float32, and in 16 bits if each token is the greedy choice or a near tie.

    In float32, by the miniature's oracle: where the answer moves further than the noise. Rounding may swap two experts, and it grows
    from token to token where the weights amplify it.
    For quantized weights: the largest change when activations almost midway between two steps are rounded to either at random. In
    16 bits: the largest change of the token, or of one of the most probable ones in its place, when the reference computes in that
    dtype."""

    @property
    def gaps(self) -> tuple[float, ...]:
        """`behind`, or, in answers without it, its value from rank and margin: infinite from the third token on."""
        if self.behind:
            return self.behind
        both = zip(self.ranks, self.margins, strict=True)
        return tuple(0.0 if rank == 0 else margin if rank == 1 else math.inf for rank, margin in both)


class NextRequest(Weights, frozen=True, kw_only=True, omit_defaults=True):
    """The whole distribution of the token after `prompt`, at temperature 1."""

    prompt: list[int]


class Next(Message, frozen=True, kw_only=True):
    """Log-probabilities by token id, one entry per id of the vocabulary."""

    logprobs: list[float]


class ExpertsRequest(Weights, frozen=True, kw_only=True, omit_defaults=True):
    """The experts of each of `tokens` when the model reads all of them."""

    tokens: list[int]
    routed: Routed = msgspec.field(default_factory=list)
    """As in `ScoreRequest`."""


class Experts(Message, frozen=True, kw_only=True):
    """`indices`: positions × layers × top_k, the most probable expert first. `margins`: positions × layers, the smallest
    distance between neighbours among the top_k + 1 highest logits; if it is below rounding, choice or order may differ. `count`:
    experts per layer."""

    indices: Routed
    margins: list[list[float]]
    count: int
    behind: list[list[float]] = msgspec.field(default_factory=list)
    """Positions × layers: distance in router logits between the order of `routed` and the router's; 0 if they are the same.
    Empty if the query has no `routed`."""


class ExpertShard(Message, frozen=True, kw_only=True):
    """A worker's share of each layer's experts: part `rank` of `workers` equal parts. `whole`: True if the part is consecutive
    whole experts (vLLM, expert parallelism with linear placement). Otherwise it is the same part of every expert's intermediate
    dimension, as vLLM shards a mixture over data-parallel workers without expert parallelism."""

    rank: int
    workers: int
    whole: bool


class ExpectedDigestsRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of policy version `version` under vLLM's parameter names and fusions for this architecture, as worker `rank` of
    `tensor_parallel` holds them, in the format `quantization` if the engines quantize. `experts` is its share of the experts;
    None means the split of tensor parallelism alone. An adapter changes no digest."""

    version: int
    quantization: Quantization | None = None
    tensor_parallel: int = 1
    rank: int = 0
    experts: ExpertShard | None = None


class ExpectedDigests(Message, frozen=True, kw_only=True):
    """parameter → "sha256-prefix:shape:dtype"."""

    digests: dict[str, str]


class NoiseRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks how far rounding in the engines' dtype moves correct answers.

    `rows`: token ids to measure on, under policy version `version`, in the reference alone. Empty: random token ids, and a bare
    engine is asked as well. A trained policy is more peaked than the checkpoint, and rounding moves it further."""

    quantization: Quantization | None = None
    version: int = 0
    rows: list[list[int]] = msgspec.field(default_factory=list)


class Moved(Message, frozen=True, kw_only=True):
    """Differences of `numbers` log-probabilities, in nats: the largest, the root mean square, and the first quartile."""

    numbers: int
    largest: float
    rms: float
    quarter: float = 0.0


class Noise(Message, frozen=True, kw_only=True):
    """How far rounding in the engines' dtype moves answers, measured before judging.

    `measured` maps names to measurements. "reference" is the reference's forward pass in that dtype, on its own contexts. All
    others come from a bare engine without a stack, which gets the same prompts in different ways: alone, in batches, in chunks,
    twice, cached. Each is compared with the reference's forward pass in higher precision.
    """

    numbers: int = 0
    """Number of compared log-probabilities."""
    largest: float = 0.0
    """Nats: the largest difference of a log-probability."""
    rms: float = 0.0
    """Nats: the largest root mean square difference of a measurement."""
    quarter: float = 0.0
    """Nats: a quarter of the reference's differences is below this."""
    weights: float = 0.0
    """Nats: the largest difference from a float32 trainer, whose weights are not rounded to the dtype. In float32 both sides
    round, and this is the sum of their rounding."""
    router: float = 0.0
    """The largest difference of a mixture's router logits. For mixtures in 16 bits all figures except `weights` are measured with
    equal routing on both sides: one expert swapped at a near tie moves later log-probabilities by nats."""
    measured: dict[str, Moved] = msgspec.field(default_factory=dict)

    @property
    def near(self) -> float:
        """Nats: twice the largest difference, since engines produce more tokens than were measured."""
        return WIDER * self.largest


class RenderRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Chat messages, and the tools that they may call, to token ids, by the model's own template and tokenizer."""

    messages: list[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    add_generation_prompt: bool = True


class DecodeRequest(Message, frozen=True, kw_only=True):
    """Token ids to text by the model's own tokenizer. It keeps spaces before punctuation."""

    tokens: list[int]
    skip_special_tokens: bool


class EncodeRequest(Message, frozen=True, kw_only=True):
    text: str
    add_special_tokens: bool


class Tokens(Message, frozen=True, kw_only=True):
    tokens: list[int]


class Text(Message, frozen=True, kw_only=True):
    text: str


Query = (
    ScoreRequest
    | NextRequest
    | ExpertsRequest
    | ExpectedDigestsRequest
    | NoiseRequest
    | RenderRequest
    | DecodeRequest
    | EncodeRequest
)
Answer = Score | Next | Experts | ExpectedDigests | Noise | Tokens | Text


class Refusal(Message, frozen=True, kw_only=True):
    """The oracle raised an error: checks that need this answer are untestable."""

    reason: str


QUERIES: dict[str, tuple[type[Message], type[Message]]] = {
    "score": (ScoreRequest, Score),
    "next": (NextRequest, Next),
    "experts": (ExpertsRequest, Experts),
    "expected_digests": (ExpectedDigestsRequest, ExpectedDigests),
    "noise": (NoiseRequest, Noise),
    "render": (RenderRequest, Tokens),
    "decode": (DecodeRequest, Text),
    "encode": (EncodeRequest, Tokens),
}
"""Method name → request and result type, for the reference's host and handle."""

METHOD_OF: dict[type[Message], str] = {request: name for name, (request, _) in QUERIES.items()}


def key(query: Message) -> str:
    """The name under which a query's answer is kept. Equal queries have equal keys in every run."""
    return METHOD_OF[type(query)] + ":" + hashlib.sha256(msgspec.json.encode(query)).hexdigest()[:24]


class UnansweredQuery(LookupError):
    """The reference was not asked this: the verdict is `untestable`, never a pass."""


class ReferenceBook(Protocol):
    """Read access to the oracle's answers. Raises `UnansweredQuery` for a query without an answer."""

    def score(self, request: ScoreRequest) -> Score: ...

    def next(self, request: NextRequest) -> Next: ...

    def experts(self, request: ExpertsRequest) -> Experts: ...

    def expected_digests(self, request: ExpectedDigestsRequest) -> dict[str, str]: ...

    def noise(self, request: NoiseRequest) -> Noise: ...

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]: ...

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
