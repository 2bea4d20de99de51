"""What the oracle is asked and what it answers. Asked by the driver after a scenario, kept beside the recordings.

The oracle itself (`backends/oracle/reference.py`) runs in its own host: Hugging Face forward pass, full context each
step, float32. It shares no code with the adapters.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import msgspec

from harness.contract.messages import Message
from harness.contract.topology import Quantization

Routed = list[list[list[int]]]
"""Positions × layers × top_k: the experts that each token was routed to, the most probable one first."""

WIDER = 2.0
"""A bound is this many times the largest rounding error that was measured."""


class Weights(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Base of questions about a model: policy version `version`, under version `adapter` of the LoRA adapter if there is
    one, held in `quantization` if the engines quantize."""

    version: int
    adapter: int | None = None
    quantization: Quantization | None = None


class ScoreRequest(Weights, frozen=True, kw_only=True, omit_defaults=True):
    """Teacher-forced scores of `tokens` after `prompt`.

    `cached` is a cache that outlived its weights: (number of tokens, policy version that read them), from the first token on, at
    most all but the last of `prompt`. Their keys and values are read; everything after them is computed by `version`.
    """

    prompt: list[int]
    tokens: list[int]
    cached: tuple[tuple[int, int], ...] = ()
    routed: Routed = msgspec.field(default_factory=list)
    """The experts that an engine reports for `prompt` and `tokens` but the last one. The reference takes them where they are a near
    tie of its own router, and its own choice elsewhere: what follows is then comparable, as it is after a token of a near tie."""


class Score(Message, frozen=True, kw_only=True):
    """One entry per token. `ranks` counts tokens with a higher probability (0: the greedy choice).

    `margins` is the log-probability of the most probable token minus that of the runner-up, at each position: how
    far a near tie is away. `logprobs` are at temperature 1.
    """

    logprobs: list[float]
    ranks: list[int]
    margins: list[float]
    behind: tuple[float, ...] = ()
    """By how many nats each token is less probable than the most probable one; 0 for the greedy choice."""
    rounding: tuple[float, ...] = ()
    """Of quantized weights: the most that each log-probability moves, in nats, when activations that lie nearly between two
    steps are rounded to either at random. Of full precision: empty."""

    @property
    def gaps(self) -> tuple[float, ...]:
        """`behind`; where it was not asked for, what rank and margin say of it: nothing but "far" of a third token."""
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
    """To which experts each of `tokens` is routed when the model is fed all of them."""

    tokens: list[int]
    routed: Routed = msgspec.field(default_factory=list)
    """As in `ScoreRequest`."""


class Experts(Message, frozen=True, kw_only=True):
    """`indices`: positions × layers × top_k, the most probable expert first; `margins`: positions × layers, the smallest
    distance between neighbours among the top_k + 1 highest logits: below it, choice or order may be another. `count`:
    experts per layer."""

    indices: Routed
    margins: list[list[float]]
    count: int
    behind: list[list[float]] = msgspec.field(default_factory=list)
    """Positions × layers: how far, in router logits, the order of `routed` is from that of the router; 0 if it is the same. Empty
    if nothing was given."""


class ExpertShard(Message, frozen=True, kw_only=True):
    """A worker's share of the experts of each layer: number `rank` of `workers` equal ones. `whole`: so many experts, in their
    order (vLLM, expert parallelism with linear placement); else the same part of every expert's intermediate dimension, as vLLM
    shards a mixture over data-parallel workers without expert parallelism."""

    rank: int
    workers: int
    whole: bool


class ExpectedDigestsRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of policy version `version` under the names and fusions that vLLM uses for this architecture, as worker `rank` of
    `tensor_parallel` holds them; in `quantization` if the engines quantize. Of the experts it holds the share `experts`; None: as
    tensor parallelism alone splits them. An adapter moves none of them."""

    version: int
    quantization: Quantization | None = None
    tensor_parallel: int = 1
    rank: int = 0
    experts: ExpertShard | None = None


class ExpectedDigests(Message, frozen=True, kw_only=True):
    """parameter → "sha256-prefix:shape:dtype"."""

    digests: dict[str, str]


class NoiseRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """How far rounding moves right answers in the dtype that the engines compute in."""

    quantization: Quantization | None = None


class Moved(Message, frozen=True, kw_only=True):
    """Differences of `numbers` log-probabilities, in nats: the largest, the root of their mean square, and what a quarter is below."""

    numbers: int
    largest: float
    rms: float
    quarter: float = 0.0


class Noise(Message, frozen=True, kw_only=True):
    """What rounding in the engines' dtype moves, measured before anything is judged.

    `measured` has each measurement by its name. "reference" is the reference's forward pass in that dtype, on contexts of its own. All
    others are a bare engine's, with no stack around it, which is asked for the same prompts in different ways: alone, in batches, in
    chunks, twice, cached. Each is compared with the reference's forward pass with more digits.
    """

    numbers: int = 0
    """Log-probabilities that were compared."""
    largest: float = 0.0
    """Nats: the largest difference of a log-probability."""
    rms: float = 0.0
    """Nats: the root of the mean squared difference, where it is largest."""
    quarter: float = 0.0
    """Nats: a quarter of the reference's differences is below this."""
    weights: float = 0.0
    """Nats: the largest difference from a float32 trainer, whose weights are not rounded to the dtype. In float32 both sides round:
    the sum of what either does."""
    router: float = 0.0
    """The largest difference of a mixture's router logits. Of mixtures in 16 bits all figures but `weights` are measured with both
    routed alike: an expert that a near tie swaps moves what follows by nats."""
    measured: dict[str, Moved] = msgspec.field(default_factory=dict)

    @property
    def near(self) -> float:
        """Nats: twice the largest difference, since an engine answers about more tokens than were measured."""
        return WIDER * self.largest


class RenderRequest(Message, frozen=True, kw_only=True):
    """Chat messages to token ids, by the model's own template (add_generation_prompt) and tokenizer."""

    messages: list[dict[str, str]]


class DecodeRequest(Message, frozen=True, kw_only=True):
    """Token ids to text by the model's own tokenizer."""

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
    """The oracle raised: what needs this answer is untestable."""

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
    """The name under which a query's answer is kept: equal queries, equal keys, whatever the run."""
    return METHOD_OF[type(query)] + ":" + hashlib.sha256(msgspec.json.encode(query)).hexdigest()[:24]


class UnansweredQuery(LookupError):
    """The reference was not asked this: the verdict is `untestable`, never a pass."""


class ReferenceBook(Protocol):
    """Read access to the oracle's answers. Raises `UnansweredQuery` for what was never asked."""

    def score(self, request: ScoreRequest) -> Score: ...

    def next(self, request: NextRequest) -> Next: ...

    def experts(self, request: ExpertsRequest) -> Experts: ...

    def expected_digests(self, request: ExpectedDigestsRequest) -> dict[str, str]: ...

    def noise(self, request: NoiseRequest) -> Noise: ...

    def render(self, messages: list[dict[str, str]]) -> list[int]: ...

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
