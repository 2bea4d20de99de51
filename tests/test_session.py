"""In which order a run asks the reference, and how it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records.reference import EncodeRequest, NextRequest
from harness.running.session import _longest_first, _or_interrupted


def test_questions_about_the_same_weights_are_asked_together():
    queries = [NextRequest(version=version, prompt=[row]) for row in range(3) for version in (0, 1)]
    assert [query.version for query in _longest_first(queries)] == [1, 1, 1, 0, 0, 0]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=20))
def test_a_prompt_is_asked_right_before_its_own_beginnings(prompts):
    other = EncodeRequest(text="first", add_special_tokens=False)
    queries = [*(NextRequest(version=1, prompt=prompt) for prompt in prompts), other]
    ordered = _longest_first(queries)
    assert ordered[0] == other
    assert sorted(map(repr, ordered)) == sorted(map(repr, queries))
    read: list[int] = []
    passes = []
    for query in ordered[1:]:
        if read[: len(query.prompt)] != query.prompt:
            read = query.prompt
            passes.append(read)
    longest = {
        tuple(one) for one in prompts if not any(more[: len(one)] == one and len(more) > len(one) for more in prompts)
    }
    assert sorted(map(tuple, passes)) == sorted(longest)


def test_an_interrupt_ends_the_run_whatever_its_scenario_answers():
    """A group of tasks raises a task's error in place of its own cancellation."""

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise RuntimeError("the server has gone") from None

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails_when_cancelled())

    async def returns() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return "all the same"

    async def interrupted(work: Coroutine[Any, Any, Any]) -> None:
        asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)
        with contextlib.suppress(Exception):
            await work

    for work in (grouped, returns):
        with asyncio.Runner() as runner, pytest.raises(KeyboardInterrupt):
            runner.run(_or_interrupted(interrupted(work())))
    with asyncio.Runner() as runner:
        assert runner.run(_or_interrupted(asyncio.sleep(0, "a result"))) == "a result"


def test_a_failure_in_a_group_of_tasks_is_no_interrupt():
    """Until Python 3.13, a group that waits for its tasks when one of them fails leaves a cancellation in its own task's count."""

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise RuntimeError("the server has gone")

    async def work() -> str:
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
        return "a result"

    with asyncio.Runner() as runner:
        assert runner.run(_or_interrupted(work())) == "a result"
