"""A pause at every kind of moment of a request's life, in every mode: the answers are those of a run without it."""

from __future__ import annotations

from typing import Any

from fixtures.prompts import Prompts
from harness.checks.base import Check
from harness.checks.continuation import continuation, same_as_uninterrupted
from harness.checks.control_plane import FAN_OUT
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.moments import Moment
from harness.contract.capability import Capability
from harness.contract.messages import PauseMode
from harness.driving.stack import Stack
from harness.suite.scenario import variants
from scenarios.moments import with_and_without_a_pause

RESET = Capability.RESET_PREFIX_CACHE
BATCH = Capability.RETRY_ABORTED_BATCH
NEEDS: dict[PauseMode, set[Capability]] = {
    "abort": {Capability.PAUSE_ABORT, Capability.RETRY_ABORTED, RESET},
    "keep": {Capability.PAUSE_KEEP, RESET},
    "wait": {Capability.PAUSE_WAIT, RESET},
}
WHEREVER: list[Check] = [continuation(*Moment), same_as_uninterrupted(*Moment), ALL_COMPLETE]
"""Checks for any moment at which pause(abort) met requests. A client that polls whether it may continue, or a router that admits
few requests at a time, may keep the chosen moment out of reach."""
FROZEN = 'SkyRL API reference, pause_generation: requests in flight "will resume from where they left off".'
WAITS = 'vLLM documentation, /pause: "wait" waits for in-flight requests to complete, including queued ones.'


def met(
    mode: PauseMode, moment: Moment, promise: str, source: str, *more: Capability, batched: bool = False
) -> dict[str, Any]:
    """The case of a pause in this mode that meets requests at this moment; `more` capabilities are needed."""
    return {
        "mode": mode,
        "moment": moment,
        "batched": batched,
        "promise": promise,
        "source": source,
        "needs": {*NEEDS[mode], *more},
        "checks": WHEREVER if mode == "abort" else [same_as_uninterrupted(moment), FAN_OUT, ALL_COMPLETE],
        "deadline_s": 120.0 if moment is Moment.QUEUED else 60.0,
    }


@variants(
    {
        "test_abort_before_the_first_token": met(
            "abort",
            Moment.BEFORE_FIRST_TOKEN,
            "rows of a batch that pause(abort) meets before their first token are asked again, whole",
            'SkyRL #1014, task 5: "Retry-on-abort works (re-feed accumulated tokens)"; SkyRL 0.1.0, '
            'InferenceEngineClient._generate_single_with_retry: "Aborted without generating tokens". For single requests: '
            "test_abort_of_queued_requests.",
            BATCH,
            batched=True,
        ),
        "test_abort_at_the_last_token": met(
            "abort",
            Moment.LAST_TOKEN,
            "a request that pause(abort) meets with one token left is given that one, and no more",
            "SkyRL 0.1.0, RemoteInferenceClient._generate_single: a retry gets the requested max_tokens minus the tokens made; "
            "with none left the answer has reached its length.",
            BATCH,
        ),
        "test_abort_of_queued_requests": met(
            "abort",
            Moment.QUEUED,
            "requests that pause(abort) meets while they wait for their turn are all answered, once",
            'SkyRL #1014, task 5; SkyRL 0.1.0, InferenceEngineClient.pause_generation: "Both in-flight and incoming requests will '
            'be blocked until resume_generation is called". There are more requests than two engines run at once.',
        ),
        "test_keep_before_the_first_token": met(
            "keep",
            Moment.BEFORE_FIRST_TOKEN,
            "a request that pause(keep) meets before its first token begins after resume()",
            FROZEN,
        ),
        "test_keep_at_the_last_token": met(
            "keep",
            Moment.LAST_TOKEN,
            "a request that pause(keep) meets with one token left makes that one after resume(), and no more",
            FROZEN,
        ),
        "test_keep_of_queued_requests": met(
            "keep",
            Moment.QUEUED,
            "requests that pause(keep) meets while they wait for their turn have it after resume()",
            'vLLM documentation, /pause: "keep" freezes requests in the queue.',
        ),
        "test_wait_before_the_first_token": met(
            "wait", Moment.BEFORE_FIRST_TOKEN, "pause(wait) lets requests that have not begun finish as well", WAITS
        ),
        "test_wait_for_queued_requests": met(
            "wait", Moment.QUEUED, "pause(wait) lets requests that wait for their turn have it and finish", WAITS
        ),
        "test_wait_at_the_last_token": met(
            "wait", Moment.LAST_TOKEN, "pause(wait) cuts nothing off requests that have one token left", WAITS
        ),
    },
    task=5,
)
async def paused_at_a_moment(stack: Stack, prompts: Prompts, *, mode: PauseMode, moment: Moment, batched: bool) -> None:
    await with_and_without_a_pause(stack, prompts, mode, moment, batched=batched)
