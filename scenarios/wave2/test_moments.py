"""A pause at every kind of moment of a request's life, in every mode: the answers are those of a run without it."""

from __future__ import annotations

from fixtures.prompts import Prompts
from harness.checks.base import Check
from harness.checks.continuation import continuation, same_as_uninterrupted
from harness.checks.control_plane import FAN_OUT
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.moments import Moment
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario
from scenarios.moments import with_and_without_a_pause

RESET = Capability.RESET_PREFIX_CACHE
ABORT = {Capability.PAUSE_ABORT, Capability.RETRY_ABORTED, RESET}
KEEP = {Capability.PAUSE_KEEP, RESET}
WAIT = {Capability.PAUSE_WAIT, RESET}


WHEREVER: list[Check] = [continuation(*Moment), same_as_uninterrupted(*Moment), ALL_COMPLETE]
"""Checks for any moment at which pause(abort) met requests. A client that polls whether it may continue, or a router that admits
few requests at a time, may keep the chosen moment out of reach."""


def unchanged(moment: Moment) -> list[Check]:
    """The checks of requests that pause(keep) or pause(wait) met at this moment."""
    return [same_as_uninterrupted(moment), FAN_OUT, ALL_COMPLETE]


@scenario(
    task=5,
    promise="rows of a batch that pause(abort) meets before their first token are asked again, whole",
    needs={*ABORT, Capability.RETRY_ABORTED_BATCH},
    checks=WHEREVER,
)
async def test_abort_before_the_first_token(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5: "Retry-on-abort works (re-feed accumulated tokens)"; SkyRL 0.1.0,
    InferenceEngineClient._generate_single_with_retry: "Aborted without generating tokens". For single requests:
    test_abort_of_queued_requests."""
    await with_and_without_a_pause(stack, prompts, "abort", Moment.BEFORE_FIRST_TOKEN, batched=True)


@scenario(
    task=5,
    promise="a request that pause(abort) meets with one token left is given that one, and no more",
    needs={*ABORT, Capability.RETRY_ABORTED_BATCH},
    checks=WHEREVER,
)
async def test_abort_at_the_last_token(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.1.0, RemoteInferenceClient._generate_single: a retry gets the requested max_tokens minus the tokens
    made; with none left the answer has reached its length."""
    await with_and_without_a_pause(stack, prompts, "abort", Moment.LAST_TOKEN)


@scenario(
    task=5,
    promise="requests that pause(abort) meets while they wait for their turn are all answered, once",
    needs=ABORT,
    checks=WHEREVER,
    deadline_s=120.0,
)
async def test_abort_of_queued_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #1014, task 5; SkyRL 0.1.0, InferenceEngineClient.pause_generation: "Both in-flight and incoming requests will
    be blocked until resume_generation is called". There are more requests than two engines run at once."""
    await with_and_without_a_pause(stack, prompts, "abort", Moment.QUEUED)


@scenario(
    task=5,
    promise="a request that pause(keep) meets before its first token begins after resume()",
    needs=KEEP,
    checks=unchanged(Moment.BEFORE_FIRST_TOKEN),
)
async def test_keep_before_the_first_token(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, pause_generation: "In-flight requests are frozen (not aborted) and will resume from where they
    left off"."""
    await with_and_without_a_pause(stack, prompts, "keep", Moment.BEFORE_FIRST_TOKEN)


@scenario(
    task=5,
    promise="a request that pause(keep) meets with one token left makes that one after resume(), and no more",
    needs=KEEP,
    checks=unchanged(Moment.LAST_TOKEN),
)
async def test_keep_at_the_last_token(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, pause_generation: "will resume from where they left off"."""
    await with_and_without_a_pause(stack, prompts, "keep", Moment.LAST_TOKEN)


@scenario(
    task=5,
    promise="requests that pause(keep) meets while they wait for their turn have it after resume()",
    needs=KEEP,
    checks=unchanged(Moment.QUEUED),
    deadline_s=120.0,
)
async def test_keep_of_queued_requests(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: "keep" freezes requests in the queue."""
    await with_and_without_a_pause(stack, prompts, "keep", Moment.QUEUED)


@scenario(
    task=5,
    promise="pause(wait) lets requests that have not begun finish as well",
    needs=WAIT,
    checks=unchanged(Moment.BEFORE_FIRST_TOKEN),
)
async def test_wait_before_the_first_token(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: "wait" waits for in-flight requests to complete."""
    await with_and_without_a_pause(stack, prompts, "wait", Moment.BEFORE_FIRST_TOKEN)


@scenario(
    task=5,
    promise="pause(wait) lets requests that wait for their turn have it and finish",
    needs=WAIT,
    checks=unchanged(Moment.QUEUED),
    deadline_s=120.0,
)
async def test_wait_for_queued_requests(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: "wait" waits for in-flight requests to complete, including queued ones."""
    await with_and_without_a_pause(stack, prompts, "wait", Moment.QUEUED)


@scenario(
    task=5,
    promise="pause(wait) cuts nothing off requests that have one token left",
    needs=WAIT,
    checks=unchanged(Moment.LAST_TOKEN),
)
async def test_wait_at_the_last_token(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: "wait" waits for in-flight requests to complete."""
    await with_and_without_a_pause(stack, prompts, "wait", Moment.LAST_TOKEN)
