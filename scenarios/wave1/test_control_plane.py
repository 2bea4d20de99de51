"""Pausing in every mode, idle and under load, and control calls that reach every server as they were given."""

from __future__ import annotations

import asyncio

from fixtures.prompts import Prompts
from harness.checks.control_plane import FAN_OUT, HEALTHY, PAUSE_STATES, WORLD_SIZE
from harness.checks.liveness import ALL_COMPLETE
from harness.checks.pausing import ABORTED, FROZEN, HELD, SAME_AS_UNINTERRUPTED, WAITED
from harness.checks.tokens import greedy
from harness.contract.capability import Capability
from harness.driving.stack import Stack
from harness.suite.scenario import scenario, under_delays
from scenarios.pauses import pause_idle, with_and_without
from scenarios.requests import ANSWER, EVERYWHERE, SPREAD, long


@scenario(
    task=13,
    promise="a greedy run with a pause(keep) in it equals the run without, and nothing is generated in between",
    needs={Capability.PAUSE_KEEP},
    checks=[FAN_OUT, FROZEN, SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
)
async def test_pause_keep_changes_nothing(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, pause_generation: "freezing in-flight requests so they can be resumed later"."""
    async with with_and_without(stack, "keep", prompts.unique(SPREAD), **long(stack)):
        pass


@scenario(
    task=13,
    promise="requests that come during pause(keep) wait for resume() and are answered then",
    needs={Capability.PAUSE_KEEP},
    checks=[HELD, FROZEN, SAME_AS_UNINTERRUPTED, greedy("late"), ALL_COMPLETE],
)
async def test_requests_that_come_during_pause_keep_wait(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: new requests are not scheduled until /resume."""
    batch, late = prompts.unique(SPREAD), prompts.unique(4)
    async with with_and_without(stack, "keep", batch, **long(stack)) as tasks:
        tasks.create_task(stack.generate(late, label="late", **ANSWER))


@scenario(
    task=5,
    promise="pause(abort) ends requests in flight with the tokens they have and the finish reason abort",
    needs={Capability.PAUSE_ABORT, Capability.PARTIAL_ANSWERS},
    checks=[FAN_OUT, ABORTED, FROZEN, HELD, greedy("late")],
)
async def test_pause_abort_returns_partial_answers(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, PauseMode.ABORT: "Clients receive partial tokens with finish_reason="abort"". New requests wait."""
    batch, late = prompts.unique(SPREAD), prompts.unique(SPREAD)
    async with with_and_without(stack, "abort", batch, **long(stack)) as tasks:
        tasks.create_task(stack.generate(late, label="late", **ANSWER))


@scenario(
    task=5,
    promise="pause(abort, clear_cache) reaches the engines with its argument",
    needs={Capability.PAUSE_ABORT, Capability.PARTIAL_ANSWERS, Capability.PAUSE_CLEAR_CACHE},
    checks=[FAN_OUT, ABORTED],
)
async def test_pause_abort_clears_the_cache_when_told(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: clear_cache says whether caches are cleared. `echo` judges that it arrives."""
    async with with_and_without(stack, "abort", prompts.unique(SPREAD), clear_cache=True, **long(stack)):
        pass


@scenario(
    task=13,
    promise="pause(wait) lets requests in flight finish and holds new ones",
    needs={Capability.PAUSE_KEEP, Capability.PAUSE_WAIT},
    checks=[FAN_OUT, WAITED, FROZEN, HELD, SAME_AS_UNINTERRUPTED, greedy("late"), ALL_COMPLETE],
)
async def test_pause_wait_lets_requests_finish(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904, PauseMode.WAIT: "Wait for in-flight requests to complete before pausing. New requests are
    blocked"."""
    batch, late = prompts.unique(SPREAD), prompts.unique(SPREAD)
    async with with_and_without(stack, "wait", batch, **long(stack)) as tasks:
        tasks.create_task(stack.generate(late, label="late", **ANSWER))


@scenario(
    task=13,
    promise="an idle stack that is paused (keep) holds what comes until resume()",
    needs={Capability.PAUSE_KEEP},
    checks=[FAN_OUT, HELD, FROZEN, greedy("late"), ALL_COMPLETE],
    topologies=EVERYWHERE,
)
async def test_idle_pause_keep_holds_requests(stack: Stack, prompts: Prompts) -> None:
    """SkyRL API reference, pause_generation and resume_generation; new requests are blocked until resume."""
    async with asyncio.TaskGroup() as tasks, pause_idle(stack, "keep", prompts.one()):
        tasks.create_task(stack.generate(prompts.unique(SPREAD), label="late", **ANSWER))


@scenario(
    task=5,
    promise="an idle stack that is paused (abort) holds what comes until resume()",
    needs={Capability.PAUSE_ABORT},
    checks=[FAN_OUT, HELD, FROZEN, greedy("late"), ALL_COMPLETE],
)
async def test_idle_pause_abort_holds_requests(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: in every mode, new requests are not scheduled until /resume."""
    async with asyncio.TaskGroup() as tasks, pause_idle(stack, "abort", prompts.one()):
        tasks.create_task(stack.generate(prompts.unique(SPREAD), label="late", **ANSWER))


@scenario(
    task=13,
    promise="an idle stack that is paused (wait) holds what comes until resume()",
    needs={Capability.PAUSE_WAIT},
    checks=[FAN_OUT, HELD, FROZEN, greedy("late"), ALL_COMPLETE],
)
async def test_idle_pause_wait_holds_requests(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: in every mode, new requests are not scheduled until /resume."""
    async with asyncio.TaskGroup() as tasks, pause_idle(stack, "wait", prompts.one()):
        tasks.create_task(stack.generate(prompts.unique(SPREAD), label="late", **ANSWER))


@scenario(
    task=13,
    promise="pausing twice is one pause, and one resume() ends it",
    needs={Capability.PAUSE_KEEP},
    checks=[FAN_OUT, HELD, FROZEN, SAME_AS_UNINTERRUPTED, ALL_COMPLETE],
)
async def test_pause_twice(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause and /resume: a state, not a count."""
    async with with_and_without(stack, "keep", prompts.unique(SPREAD), **long(stack)) as tasks:
        await stack.pause("keep")
        tasks.create_task(stack.generate(prompts.unique(2), **ANSWER))


@scenario(
    task=13,
    promise="resume() without a pause, and twice after one, does no harm",
    needs={Capability.PAUSE_KEEP},
    checks=[FAN_OUT, greedy(), ALL_COMPLETE],
)
async def test_resume_without_a_pause(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /resume: a state, not a count."""
    await stack.resume()
    await stack.generate(prompts.unique(4), **ANSWER)
    await stack.pause("keep")
    await stack.resume()
    await stack.resume()
    await stack.generate(prompts.unique(4), **ANSWER)


@scenario(
    task=5,
    promise="resume() without a pause(abort), and twice after one, does no harm",
    needs={Capability.PAUSE_ABORT},
    checks=[greedy(), ALL_COMPLETE],
)
async def test_resume_without_an_abort(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /resume: a state, not a count."""
    await stack.attempt(stack.resume())
    await stack.generate(prompts.unique(4), **ANSWER)
    await stack.pause("abort")
    await stack.resume()
    await stack.attempt(stack.resume())
    await stack.generate(prompts.unique(4), **ANSWER)


@scenario(
    task=5,
    promise="completions, single and in a batch, that come while an idle stack is paused (abort) wait for resume()",
    needs={Capability.PAUSE_ABORT, Capability.COMPLETION},
    checks=[HELD, ALL_COMPLETE],
)
async def test_completions_that_come_during_pause_abort_wait(stack: Stack, prompts: Prompts) -> None:
    """vLLM documentation, /pause: in every mode, new requests are not scheduled until /resume, whatever route they take."""
    one, batch = prompts.one(), prompts.unique(4)
    async with asyncio.TaskGroup() as tasks, pause_idle(stack, "abort", prompts.one()):
        for asked in (one, batch):
            body = {"model": stack.model_name, "prompt": asked, "return_token_ids": True, **ANSWER}
            tasks.create_task(stack.attempt(stack.completion(body)))


@scenario(
    task=13,
    promise="is_paused() names every server and follows pause() and resume()",
    needs={Capability.PAUSE_KEEP, Capability.IS_PAUSED},
    checks=[PAUSE_STATES, FAN_OUT],
    topologies=EVERYWHERE,
)
async def test_is_paused_names_every_server(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - every scenario has both
    """SkyRL #899, review of /is_paused: "a mapping from server_urls to is_paused state of each engine"."""
    await stack.is_paused()
    await stack.pause("keep")
    await stack.is_paused()
    await stack.resume()
    await stack.is_paused()


@scenario(
    task=3,
    promise="each control call reaches every server, external ones too, exactly once",
    needs={Capability.PAUSE_KEEP, Capability.RESET_PREFIX_CACHE},
    checks=[FAN_OUT, ALL_COMPLETE, greedy()],
    topologies=EVERYWHERE,
)
async def test_control_calls_reach_every_server(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #904: "Control plane (fan-out): pause(), resume(), sleep(), wake_up(), reset_prefix_cache()"; SkyRL #1014,
    task 3: "Control plane fan-out to external server works"."""
    for _ in range(2):
        await stack.pause("keep")
        await stack.resume()
        await stack.reset_prefix_cache()
    await stack.generate(prompts.unique(4), **ANSWER)


@scenario(
    task=5,
    promise="reset_prefix_cache(reset_running_requests) reaches the engines with its argument",
    needs={Capability.RESET_PREFIX_CACHE, Capability.RESET_RUNNING_REQUESTS},
    checks=[FAN_OUT, ALL_COMPLETE],
)
async def test_reset_prefix_cache_takes_its_argument_along(stack: Stack, prompts: Prompts) -> None:
    """SkyRL 0.2.0, RemoteInferenceClient.reset_prefix_cache: "reset_running_requests: Whether to reset running
    requests". `echo` judges that it arrives."""
    await stack.generate(prompts.unique(2), **ANSWER)
    await stack.reset_prefix_cache(reset_running_requests=True)


@scenario(
    task=0,
    promise="health() is true while servers work",
    needs={Capability.HEALTH},
    checks=[HEALTHY, ALL_COMPLETE],
    topologies=EVERYWHERE,
)
async def test_health_is_true(stack: Stack, prompts: Prompts) -> None:
    """SkyRL #899, review of /health: "if at least one engine exists that is healthy it should return true"."""
    await stack.health()
    await stack.generate(prompts.unique(2), **ANSWER)
    await stack.health()


@scenario(
    task=8,
    promise="world_size() counts the inference workers of all servers",
    needs={Capability.WORLD_SIZE},
    checks=[WORLD_SIZE],
    topologies=EVERYWHERE,
)
async def test_world_size_counts_all_workers(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001 - every scenario has both
    """SkyRL #1014, task 8: "get_world_size() returns 4 (2 servers × 2 TP)"."""
    await stack.world_size()
    await stack.world_size()


test_pause_keep_changes_nothing_under_delays = under_delays(test_pause_keep_changes_nothing)
test_requests_that_come_during_pause_keep_wait_under_delays = under_delays(
    test_requests_that_come_during_pause_keep_wait
)
test_pause_abort_returns_partial_answers_under_delays = under_delays(test_pause_abort_returns_partial_answers)
test_pause_wait_lets_requests_finish_under_delays = under_delays(test_pause_wait_lets_requests_finish)
test_is_paused_names_every_server_under_delays = under_delays(test_is_paused_names_every_server)
test_control_calls_reach_every_server_under_delays = under_delays(test_control_calls_reach_every_server)
