"""Every form in which a caller may give the arguments of a call, as the stack's own client takes them, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fixtures.prompts import Prompts
from harness.checks.call_forms import CALL_FORMS, KEPT_ARGUMENTS
from harness.contract.capability import Capability
from harness.contract.states import TAGS
from harness.driving.stack import Stack
from harness.records.argument_forms import ADMITTED, AS_IT_IS
from harness.suite.scenario import scenario, variants
from scenarios.requests import one_by_one, until_idle

SESSION = "6f1c0a52-5d0b-4a3e-9a6e-0d7f5a1b2c3d"
"""A text, or a UUID: callers make sessions of either."""
PARAMS: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 0.0,
    "stop_token_ids": [5],
    "stop": ["zz"],
    "ignore_eos": False,
}
Ask = Callable[[str], Coroutine[Any, Any, Any]]
"""Label → the call."""
PROMISE = "an argument means the same in every form that it can have, or is refused by name; the caller's own object stays as it is"


def by_generate(stack: Stack, prompts: Prompts) -> Ask:
    prompt = prompts.one()
    return lambda label: stack.generate([prompt], session_ids=[SESSION], label=label, **PARAMS)


def by_sample(stack: Stack, prompts: Prompts) -> Ask:
    prompt = prompts.one()
    return lambda label: stack.sample(prompt, 1, session_id=SESSION, label=label, **PARAMS)


def by_chat(stack: Stack, prompts: Prompts) -> Ask:
    body = {"model": stack.model_name, "messages": prompts.conversations(1)[0], "session_id": SESSION, **PARAMS}
    return lambda label: stack.chat_completion(body, label=label)


def by_completion(stack: Stack, prompts: Prompts) -> Ask:
    body = {"model": stack.model_name, "prompt": prompts.one(), "session_id": SESSION, **PARAMS}
    return lambda label: stack.completion(body, label=label)


@variants(
    {
        "test_generate": {"send": by_generate},
        "test_sample": {"send": by_sample, "needs": {Capability.SAMPLE}},
        "test_chat_completion": {"send": by_chat, "needs": {Capability.CHAT_COMPLETION}},
        "test_completion": {"send": by_completion, "needs": {Capability.COMPLETION}},
    },
    task=0,
    promise=PROMISE,
    checks=[CALL_FORMS, KEPT_ARGUMENTS],
    deadline_s=120,
    bulk=True,
)
async def every_form(stack: Stack, prompts: Prompts, *, send: Callable[[Stack, Prompts], Ask]) -> None:
    """SkyRL API reference, InferenceEngineInterface: the arguments and their types."""
    await formed(stack, AS_IT_IS, send(stack, prompts))
    forms = stack.within_budget(await stack.form(None))
    forms.sort(key=_risk)
    await one_by_one(stack, (stack.attempt(formed(stack, form, send(stack, prompts.of(form)))) for form in forms))
    await stack.form(None)
    if not await until_idle(stack):
        stack.give_up()


async def formed(stack: Stack, form: str, ask: Ask) -> None:
    """The call with its arguments in this form."""
    await stack.form(form)
    await ask(form)


@scenario(
    task=0,
    promise=PROMISE,
    needs={
        Capability.PAUSE_KEEP,
        Capability.RESET_PREFIX_CACHE,
        Capability.SLEEP,
        Capability.WAKE_UP_TAGS,
        Capability.WEIGHT_SYNC,
    },
    checks=[CALL_FORMS, KEPT_ARGUMENTS],
    topologies=["colocated"],
    deadline_s=120,
    bulk=True,
)
async def test_control_calls(stack: Stack, prompts: Prompts) -> None:  # noqa: ARG001
    """SkyRL API reference, InferenceEngineInterface: the arguments and their types; vLLM documentation, Sleep Mode."""

    asks: dict[str, Ask] = {
        "pause": lambda label: stack.pause("keep", label=label),
        "reset_prefix_cache": lambda label: stack.reset_prefix_cache(label=label),
        "sleep": lambda label: stack.sleep(1, label=label),
        "wake_up": lambda label: stack.wake_up(["weights"], label=label),
    }

    async def driven(call: str, form: str) -> list[str]:
        """The call in this form; afterwards the engines work again. Returns the forms that its arguments can have."""
        if call == "wake_up":
            await stack.sleep(1)
        await stack.attempt(formed(stack, form, asks[call]))
        forms = await stack.form(None)
        for tag in TAGS:
            await stack.wake_up([tag])
        await stack.resume()
        return forms

    for call in asks:
        for form in stack.within_budget(await driven(call, AS_IT_IS)):
            await driven(call, form)
    await stack.sync_weights(1)  # an engine may have discarded its weights


def _risk(form: str) -> tuple[bool, bool]:
    """Forms that may stop an engine come last, since nothing is told after them: those of another library's types, then those that
    no annotation admits."""
    kind = form.rpartition(": ")[2]
    return kind.startswith("NumPy"), kind not in ADMITTED
