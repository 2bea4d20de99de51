"""The data-plane scenarios driven against a correct toy: each puts its promise to the test, and none cries wolf."""

from __future__ import annotations

import asyncio
import importlib
import inspect

import msgspec
import pytest

from fixtures.prompts import Prompts
from harness.scenario import declaration
from tests.toy_stack import ToyStack
from tests.traces import FakeReference, judge

AREAS = ("ordering", "tokens", "stopping", "text", "messages", "sample", "completion", "chat", "tokenize", "errors")
REFERENCE = FakeReference(vocab_size=512)


def scenarios():
    for area in AREAS:
        module = importlib.import_module(f"scenarios.wave1.test_{area}")
        for name, function in inspect.getmembers(module, inspect.iscoroutinefunction):
            if declaration(function) is not None:
                yield pytest.param(function, id=f"{area}.{name}")


def findings(function, stack):
    declared = declaration(function)
    asyncio.run(function(stack, Prompts(declared.name)))
    for check in declared.checks:
        yield check, judge(check, *stack.calls, observations=stack.observations, reference=REFERENCE)


@pytest.mark.parametrize("function", list(scenarios()))
def test_a_correct_stack_passes(function):
    for check, finding in findings(function, ToyStack(REFERENCE)):
        assert (check.name, finding.status, finding.reason, finding.evidence[:1]) == (check.name, "pass", "", [])
        assert finding.facts > 0


class Swaps(ToyStack):
    def _generation(self, runs):
        return super()._generation(runs[::-1])


class Changes(ToyStack):
    """Runs each request under other parameters than it was given."""

    changes: dict

    def _run(self, prompt, params, copy=0):
        return super()._run(prompt, params | self.changes, 0 if "copy" in self.changes else copy)


class ForgetsErrors(ToyStack):
    async def attempt(self, call):
        await super().attempt(call)
        last = self.calls[-1]
        if last.error is not None:
            empty = {"response_ids": [], "responses": [], "stop_reasons": []}
            self.calls[-1] = msgspec.structs.replace(last, error=None, result=empty)


class CountsOnce(ToyStack):
    def _body(self, body, prompts, kind, content):
        response = super()._body(body, prompts, kind, content)
        if "usage" in response.body:
            response.body["usage"]["prompt_tokens"] = len(prompts[0])
        return response


def changing(**changes):
    return type("Changing", (Changes,), {"changes": changes})


@pytest.mark.parametrize(
    ("broken", "scenario", "reason"),
    [
        (Swaps, "ordering.test_results_keep_the_order_of_prompts", "results are not in the order of their prompts"),
        (changing(temperature=1.0), "tokens.test_greedy_tokens_and_logprobs_are_the_models", "greedy output parts"),
        (changing(logprobs=None), "tokens.test_logprobs_of_sampled_tokens", "asked for and none came"),
        (changing(logprobs=0), "tokens.test_no_logprobs_unless_asked_for", "not asked for"),
        (changing(seed=1), "tokens.test_a_seed_repeats_its_output", "outputs of once and other are the same"),
        (changing(seed=None), "tokens.test_a_seed_repeats_its_output", "tokens differ between once and again"),
        (changing(seed=None), "tokens.test_a_seed_does_not_depend_on_company", "tokens differ between alone"),
        (changing(seed=1), "tokens.test_rows_of_one_prompt_are_independent", "all samples of a prompt are the same"),
        (changing(temperature=0.7), "tokens.test_samples_follow_the_models_distribution", "do not come from"),
        (changing(temperature=1.0), "tokens.test_samples_follow_the_temperature", "do not come from"),
        (changing(top_k=0), "tokens.test_filters_hold", "outside top_k"),
        (changing(top_p=1.0), "tokens.test_filters_hold", "outside top_p"),
        (changing(min_p=0.0), "tokens.test_filters_hold", "outside min_p"),
        (changing(max_tokens=8), "stopping.test_max_tokens", "output went on after its length"),
        (changing(stop_token_ids=[]), "stopping.test_stop_token_ids", "output went on after its stop token"),
        (changing(min_tokens=0), "stopping.test_min_tokens", "output was stopped before min_tokens"),
        (changing(ignore_eos=True), "stopping.test_end_of_sequence", "output went on after its eos"),
        (changing(ignore_eos=False), "stopping.test_end_of_sequence", "ended before anything that was to end it"),
        (changing(stop=[]), "stopping.test_stop_strings", "output went on after its stop string"),
        (changing(include_stop_str_in_output=True), "stopping.test_stop_strings", "text holds the stop string"),
        (
            changing(include_stop_str_in_output=False),
            "stopping.test_stop_strings_included",
            "text lacks the stop string",
        ),
        (changing(skip_special_tokens=False), "text.test_special_tokens_are_skipped", "holds special tokens"),
        (changing(skip_special_tokens=True), "text.test_special_tokens_are_kept", "lacks special tokens"),
        (changing(copy=0), "sample.test_seeded_samples_are_independent", "all samples of a prompt are the same"),
        (CountsOnce, "completion.test_a_batch_of_tokens", "miscounts prompt_tokens"),
        (ForgetsErrors, "errors.test_an_over_long_prompt", "returned an empty success instead of failing"),
        (ForgetsErrors, "errors.test_fewer_session_ids_than_prompts", "returned an empty success instead of failing"),
    ],
)
def test_each_fault_is_red_in_its_scenario(broken, scenario, reason):
    area, name = scenario.split(".")
    function = getattr(importlib.import_module(f"scenarios.wave1.test_{area}"), name)
    red = [finding.reason for _, finding in findings(function, broken(REFERENCE)) if finding.status == "fail"]
    assert any(reason in r for r in red), red
