"""The taps' seeded faults: the checks that must turn red on each real stack, and the scenarios that show it.

The two stacks differ in what lies between caller and engine. SkyRL's HTTP client retries a broken connection. After a server error,
vllm-router 0.1.12 repeats /v1/completions (five attempts, on the same server), but never /inference/v1/generate. The legacy client
does neither. `slow` is not listed: no check of one stack can see it, only the pace of a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.contract.faults import DRIVEN, NOTHING, Fact, Fault

TOKENS = "tokens.test_greedy_tokens_and_logprobs_are_the_models"
MANY = "tokens.test_logprobs_of_many_tokens"
BATCHES = "ordering.test_batches_of_any_size"
SAMPLES = "sample.test_samples_are_independent"
CHOICES = "completion.test_a_batch_of_tokens"
ONE_CHOICE = "completion.test_one_prompt_of_tokens"
TEXTS = "completion.test_text_of_choices"
LENGTHS = "stopping.test_max_tokens"
OVER_LONG = "errors.test_an_over_long_prompt"
SESSIONS = "routing.test_sessions_stick_over_turns_and_batches"
SESSIONLESS = "routing.test_a_batch_without_sessions_is_spread"
CONTROLS = "control_plane.test_control_calls_reach_every_server"
IDLE_PAUSE = "control_plane.test_idle_pause_keep_holds_requests"
IS_PAUSED = "control_plane.test_is_paused_names_every_server"
CACHE = "weight_sync.test_prefix_cache_is_fresh_after_a_sync"
SYNC = "weight_sync.test_sync_reaches_every_parameter_of_every_server"

BODY = ("completion.envelope", "completion.usage", "tokens.greedy", "stopping")
"""Checks of a completion's body. None of them judges a body that lacks requested choices or has extra ones."""


def _fault(
    fault: str,
    breaks: str,
    scenarios: str | Iterable[str],
    caught_by: str,
    corrupts: Fact = NOTHING,
    *,
    exact: bool = False,
) -> Fault:
    """A fault by its id; `caught_by` may name several checks, separated by spaces."""
    name, _, variant = fault.partition("/")
    return Fault(
        name=name,
        variant=variant,
        breaks=breaks,
        caught_by=frozenset(caught_by.split()),
        corrupts=corrupts,
        exact=exact,
        scenarios=frozenset([scenarios] if isinstance(scenarios, str) else scenarios),
    )


_BOTH: tuple[Fault, ...] = (
    _fault(
        "tokens_edited/a_lot",
        "every token of an answer is replaced on its way",
        TOKENS,
        "tokens.greedy conservation",
        Fact.ANSWERS,
    ),
    _fault(
        "tokens_edited/a_little",
        "one token of one response in an answer is replaced on its way",
        TOKENS,
        "tokens.greedy conservation",
        Fact.ANSWERS,
    ),
    _fault("output_cut_short", "a response arrives without its second half", TOKENS, "tokens.greedy conservation"),
    _fault("logprobs_off_by_constant/a_lot", "log-probabilities are lower by 0.5 nats", MANY, "logprobs.mean"),
    _fault("logprobs_off_by_constant/a_little", "log-probabilities are lower by 0.02 nats", MANY, "logprobs.mean"),
    _fault(
        "logprobs_off_by_constant/a_hair",
        "log-probabilities are lower by 0.002 nats",
        {TOKENS, MANY},
        "logprobs.reference logprobs.mean",
        exact=True,
    ),
    _fault(
        "logprobs_shifted", "each token comes with the log-probability of the one before", TOKENS, "logprobs.reference"
    ),
    _fault(
        "logprobs_nan",
        "one log-probability of an answer is not a number",
        TOKENS,
        "logprobs.numbers numbers_are_numbers",
        Fact.LOGPROBS,
    ),
    _fault("executed_twice", "a request is sent to its engine twice", TOKENS, "conservation"),
    _fault("result_lost", "an answer lacks its last response", SAMPLES, "conservation", Fact.ANSWERS),
    _fault("response_doubled", "an answer holds its last response twice", SAMPLES, "conservation", Fact.ANSWERS),
    _fault("choice_index_wrong", "choices are counted from 1", ONE_CHOICE, "completion.envelope", Fact.ANSWERS),
    _fault("usage_wrong", "usage counts a token that nobody generated", CHOICES, "completion.usage"),
    _fault("finish_reason_edited", 'the finish reasons "length" and "stop" are exchanged', LENGTHS, "stopping"),
    _fault(
        "error_becomes_empty",
        "a refused request is answered with a success that holds nothing",
        OVER_LONG,
        "errors.named conservation",
        Fact.ERRORS,
    ),
    _fault("server_error/always", "every request of the data plane is answered with a server error", BATCHES, DRIVEN),
    _fault(
        "control_swallowed/every_server",
        "control calls are confirmed and reach no server",
        CONTROLS,
        "fan_out clean_room",
        Fact.PAUSES,
    ),
    _fault(
        "control_swallowed/one_server",
        "control calls to one server are confirmed and do not reach it",
        CONTROLS,
        "fan_out clean_room",
        Fact.PAUSES,
    ),
    _fault(
        "stale_prefix_cache",
        "resets of the prefix cache are confirmed and reach no server",
        CACHE,
        "weight_history fan_out",
        Fact.POLICY,
    ),
    _fault(
        "sync_missed/one_server",
        "one server takes part in a weight sync and keeps its weights",
        SYNC,
        "every_parameter uniform_servers weight_history",
    ),
    _fault(
        "sync_missed/every_server",
        "all servers take part in a weight sync and keep their weights",
        SYNC,
        "every_parameter weight_history forced_effect",
    ),
    _fault(
        "parameter_not_updated", "one parameter is left out of every weight sync", SYNC, "every_parameter", Fact.POLICY
    ),
)

_OF_HTTP: tuple[Fault, ...] = (
    _fault(
        "disconnected/first_time",
        "the first connection to each server breaks in the middle of its response; the client asks again",
        TOKENS,
        "conservation",
    ),
    _fault(
        "server_error/first_time_after_execution",
        "the first request to each server is executed and answered with a server error",
        TOKENS,
        DRIVEN,
    ),
    _fault(
        "server_error/first_completion_after_execution",
        "the first completion of each server is executed and answered with a server error; the router asks again",
        ONE_CHOICE,
        "conservation",
    ),
    _fault(
        "server_error/in_front_of_the_router",
        "every request is answered with a server error before the router sees it",
        BATCHES,
        DRIVEN,
    ),
    _fault(
        "results_swapped/between_requests",
        "two requests to one server get each other's responses",
        BATCHES,
        "ordering",
        Fact.ANSWERS,
    ),
    _fault(
        "results_swapped/within_an_answer",
        "the first two choices of a body are exchanged",
        CHOICES,
        "tokens.greedy conservation",
    ),
    _fault("text_not_of_tokens", "text has a character more than its tokens", TEXTS, "text"),
    _fault(
        "pause_reaches_some",
        "pause() is confirmed by one server that never got it",
        [IS_PAUSED],
        "fan_out pause_states",
    ),
    _fault(
        "header_dropped/session",
        "the header that names the session is lost between client and router",
        SESSIONS,
        "sticky_sessions",
    ),
    _fault("session_moves", "each turn reaches the router under another session's name", SESSIONS, "sticky_sessions"),
    _fault(
        "one_server_gets_all",
        "requests without a session reach the router with one and the same",
        SESSIONLESS,
        "sessionless_spread",
    ),
)

_OF_LEGACY: tuple[Fault, ...] = (
    _fault("disconnected/first_time", "the first call of each engine is lost on its way back", TOKENS, DRIVEN),
    _fault(
        "server_error/first_time_after_execution",
        "the first request to each engine is executed and then fails",
        TOKENS,
        DRIVEN,
    ),
    _fault(
        "results_swapped/within_an_answer",
        "the first two responses of an engine's answer are exchanged",
        BATCHES,
        "ordering",
        Fact.ANSWERS,
    ),
    _fault(
        "text_not_of_tokens",
        "text has a character more than its tokens",
        [TEXTS, "text.test_text_is_the_decoded_tokens"],
        "text",
    ),
    _fault(
        "pause_reaches_some",
        "pause() is confirmed by one engine that never got it",
        IDLE_PAUSE,
        "fan_out frozen_while_paused",
    ),
)

_LETHAL: tuple[Fault, ...] = (_fault("hang", "a request of the data plane is never answered", BATCHES, DRIVEN),)
"""A stack cannot be used again after these faults. They come last, so that no stack has to be started after them."""

HTTP_FAULTS: tuple[Fault, ...] = (*_BOTH, *_OF_HTTP, *_LETHAL)
LEGACY_FAULTS: tuple[Fault, ...] = (*_BOTH, *_OF_LEGACY, *_LETHAL)
FAULTS: tuple[Fault, ...] = tuple(dict.fromkeys((*HTTP_FAULTS, *LEGACY_FAULTS)))
"""The faults of both stacks. An id occurs twice if the stacks react differently."""
