"""The miniature keeps the contract deterministically; a broken one breaks one promise."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from backends.miniature import model, router, tokenizer, trainer
from backends.miniature.engine import STEP_S
from backends.miniature.faults.registry import parts
from backends.miniature.reference import MiniatureReference
from backends.miniature.stack import Parts
from harness.checks.liveness import ALL_COMPLETE
from harness.contract.clock import SimulatedLoop, monotonic, now_ns
from harness.contract.errors import CallTimedOut, HarnessError, UsageError
from harness.contract.faults import family
from harness.contract.messages import StartRequest
from harness.contract.topology import Topology
from harness.driving.inline import InlineHost
from harness.machine.progress import silent
from harness.machine.targets import known
from harness.records.reference import Score, ScoreRequest
from harness.running import catalogue
from harness.running.session import Options, Session
from harness.suite.scenario import LATE_SEED, declaration, scenario
from tests.miniature import bench

TARGETS = ("miniature", "miniature:retry")


def test_the_correct_miniatures_pass_a_scenario_of_every_check(tmp_path):
    """On the first miniature that is able to. The control of `parity prove` drives every scenario on both."""
    judged = {s: {family(check.name) for check in s.checks} for s in catalogue.declared().values()}
    quick_first = sorted(judged, key=lambda s: (s.bulk, -len(judged[s])))
    left = set().union(*judged.values())
    for target in TARGETS:
        with bench(tmp_path / target, target) as stack:
            for scenario in quick_first:
                if judged[scenario] & left and scenario.needs <= known(target).capabilities:
                    left -= judged[scenario]
                    verdicts = stack.drive(scenario.name)
                    shown = [(v.check, v.status, v.reason) for v in verdicts if v.status != "pass"]
                    assert {v.status for v in verdicts} == {"pass"}, (scenario.name, shown)
    assert not left


@pytest.mark.parametrize(
    ("name", "fault", "check"),
    [
        ("keep.test_a_cleared_cache_changes_no_answer", "tokens_lost_on_continuation/keep", "pause_changes_nothing"),
        ("multi_turn.test_turns_in_batches", "turns_retokenized", "turns_keep_tokens"),
        ("weight_sync.test_syncing_the_same_version_changes_nothing", "sync_not_idempotent/a_lot", "every_parameter"),
        ("weight_sync.test_prefix_cache_is_fresh_after_a_sync", "stale_prefix_cache/every_server", "weight_history"),
    ],
)
def test_16_bits_make_no_correct_stack_red_and_hide_no_large_fault(tmp_path, name, fault, check):
    """Rounding differs from step to step, so a request may be answered otherwise the second time."""
    with bench(tmp_path, dtype="bfloat16") as stack:
        assert stack.red(name) == {}
        stack.inject(fault)
        assert check in stack.red(name)


def test_the_two_miniatures_offer_all_there_is():
    one, other = (known(target).capabilities for target in TARGETS)
    assert {s.name for s in catalogue.declared().values() if not (s.needs <= one or s.needs <= other)} == set()


def test_the_same_drive_gives_the_same_recording(tmp_path):
    recorded = []
    for number in range(2):
        with bench(tmp_path / str(number)) as stack:
            stack.drive("control_plane.test_pause_keep_changes_nothing")
            stack.drive("tokens.test_samples_follow_the_models_distribution")
            recorded.append(
                msgspec.json.encode(stack.trace("tokens.test_samples_follow_the_models_distribution").calls)
            )
    assert recorded[0] == recorded[1]


def test_a_second_drive_is_not_the_first_one_again(tmp_path):
    """Random numbers continue from take to take: twenty repetitions are twenty different runs."""
    name, drawn = "tokens.test_samples_follow_the_models_distribution", []
    with bench(tmp_path / "run") as stack:
        for _ in range(2):
            stack.drive(name)
            drawn.append([call.result for call in stack.trace(name).calls if call.phase == "scenario"])
    assert drawn[0] != drawn[1]


def test_a_fault_that_is_not_seeded_is_refused(tmp_path):
    with bench(tmp_path / "run") as stack, pytest.raises(KeyError):
        stack.inject("no_such_fault")
    with pytest.raises(KeyError):
        parts("no_such_fault", Parts())


def test_a_fault_counts_itself_and_is_gone_when_the_next_is_injected(tmp_path):
    with bench(tmp_path / "run") as stack:
        stack.inject("usage_wrong/counted_twice")
        assert "completion.usage" in stack.red("completion.test_a_batch_of_tokens")
        assert stack.inject(None) > 0
        assert stack.red("completion.test_a_batch_of_tokens") == {}
        assert stack.inject(None) == 0


def test_a_fault_names_the_functions_that_its_part_replaces_unless_it_may_differ_from_the_start():
    seeded = known("miniature").seeded()
    assert seeded["hop_error_loses_its_cause"].changes == {"Router.over_broken_hop"}
    assert seeded["count_lost/by_a_copy"].changes == {"Client.__getstate__"}
    assert seeded["session_moves/second_turn"].changes == frozenset()


def test_real_and_inline_stacks_do_not_mix(tmp_path):
    options = Options(baseline="miniature", candidate="skyrl-0.2.0:http", engine="cpu", run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="run different models"):
        Session(options, silent)


def test_a_reference_that_did_not_start_is_named_each_time(tmp_path, monkeypatch):
    async def never(self, method, *_):
        raise CallTimedOut(f"{method} did not return")

    with bench(tmp_path / "run") as stack:
        monkeypatch.setattr(InlineHost, "call", never)
        with pytest.raises(HarnessError, match="did not return"):
            stack.red("tokens.test_greedy_tokens_and_logprobs_are_the_models")
        with pytest.raises(HarnessError, match=r"the reference for .* did not start"):
            stack.red("tokens.test_greedy_tokens_and_logprobs_are_the_models")


# --- simulated time -------------------------------------------------------------------------------------------------


def simulated(coroutine):
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)


def test_simulated_time_passes_without_waiting():
    async def sleep_long():
        before, began = now_ns(), monotonic()
        await asyncio.sleep(3600)
        return now_ns() - before, monotonic() - began

    nanoseconds, seconds = simulated(sleep_long())
    assert nanoseconds == pytest.approx(3600 * 10**9)
    assert seconds == pytest.approx(3600)


def test_simulated_readings_are_in_one_order():
    async def read():
        return [now_ns() for _ in range(1000)]

    times = simulated(read())
    assert times == sorted(set(times))


def test_waiting_for_what_cannot_happen_is_an_error():
    with pytest.raises(RuntimeError, match="nothing is left that could ever happen"):
        simulated(asyncio.Event().wait())


# --- the model ------------------------------------------------------------------------------------------------------


def test_a_network_in_single_precision_is_the_exact_one_but_for_rounding():
    single, exact = model.Network(model.policy(0)), model.Network(model.policy(0), model.np.float64)
    one, other = single.root, exact.root
    for token in range(3, 300, 7):
        one, other = single.feed(one, token), exact.feed(other, token)
    assert abs(single.row(one) - exact.row(other)).max() < 1e-4
    assert model.np.exp(exact.row(other)).sum() == pytest.approx(1)


def _frozen_answer(prompt: list[int], by_old: int, length: int) -> list[int]:
    """What engines make, in single precision, with version 0 up to token `by_old` and with version 1 from there on."""
    engines = [model.Network(trainer.parameters(version, ""), np.float32) for version in (0, 1)]
    node, tokens = engines[0].root, list(prompt)
    for at in range(len(prompt) + length - 1):
        node = engines[at >= len(prompt) + by_old - 1].adopt(node)
        node = node.network.feed(node, tokens[at])
        if at + 1 >= len(prompt):
            reader = engines[at + 1 >= len(prompt) + by_old]
            tokens.append(int(reader.row(reader.adopt(node)).argmax()))
    return tokens[len(prompt) :]


def _scored(prompt: list[int], by_old: int, made: list[int]) -> Score:
    """What the oracle says of the tokens that version 1 made."""
    oracle = MiniatureReference()
    given = StartRequest(target="miniature", topology=Topology(), model_path="", scratch="", logs="")
    asyncio.run(oracle.start(given))
    cached = ((len(prompt) + by_old - 1, 0),)
    asked = ScoreRequest(version=1, prompt=[*prompt, *made[:by_old]], tokens=made[by_old:], cached=cached)
    return asyncio.run(oracle.score(asked))


def test_where_two_experts_are_nearly_equal_the_reference_says_what_single_precision_does_there():
    prompt, tied = [158, 386, 229, 190, 261, 385, 182, 506, 288, 476, 471, 68], 159
    made = _frozen_answer(prompt, 20, tied + 1)
    score = _scored(prompt, 20, made)
    assert [at + 20 for at, gap in enumerate(score.gaps) if gap > 0.01] == [tied], (
        "in double precision it is no near tie"
    )
    assert 2 * max(score.rounding) > score.gaps[tied - 20] > 0.1
    assert sum(moved > 1e-3 for moved in score.rounding) == 1
    assert _scored(prompt, 20, made[:60]).rounding == (), "no two experts are nearly equal here"


def test_rounding_that_grows_from_token_to_token_is_told():
    prompt = [166, 510, 274, 382, 10, 34, 368, 313, 102, 145, 467, 81]
    made = _frozen_answer(prompt, 20, 188)
    score = _scored(prompt, 20, made)
    assert 2 * max(score.rounding) > max(0.005, *score.gaps)
    assert max(score.rounding[:40]) < 1e-3
    assert _scored(prompt, 20, made[:60]).rounding == ()


def test_versions_adapters_and_quantization_move_every_row():
    base = model.policy(0)
    others = [
        model.policy(1),
        model.with_adapter(base, model.adapter(1)),
        *(model.dequantize(model.quantize(base, kind)) for kind in ("int8", "fp8")),
    ]
    row = [model.network(p).row(model.network(p).feed(model.network(p).root, 5)) for p in (base, *others)]
    assert all(abs(row[0] - other).max() > 1e-2 for other in row[1:])


def test_networks_of_equal_parameters_are_one():
    again = {name: tensor.copy() for name, tensor in model.policy(3).items()}
    assert model.network(model.policy(3)) is model.network(again)
    assert model.network(model.policy(3)) is not model.network(model.policy(4))


def test_fp8_has_three_bits_after_the_leading_one():
    numbers = model.np.array([448.0, -448.0, 17.0, 18.9, 1.06, 2**-6 * 1.06, 2**-9, 2**-10 * 1.01, 2**-11, 0.0])
    held = [448.0, -448.0, 16.0, 18.0, 1.0, 2**-6, 2**-9, 2**-9, 0.0, 0.0]
    assert model.e4m3(numbers).tolist() == held


@pytest.mark.parametrize("text", ["", "the other", "naïve 日本語 🎉", "<|im_start|>user\nhi<|im_end|>", "\x00\t "])
def test_text_survives_the_tokenizer(text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_tokens_need_not_survive_their_text():
    spelled = tokenizer.encode("t") + tokenizer.encode("h")
    assert tokenizer.encode(tokenizer.decode(spelled)) != spelled


# --- moments that a busy driver misses --------------------------------------------------------------------------------


def catching(stack, enough_at: int, times: int = 1):
    """A scenario that needs a request in flight with sixteen tokens, `times` times per attempt. It asks for too few tokens until
    attempt `enough_at`."""
    made_up = scenario(task=0, promise="a request is caught in flight", checks=[ALL_COMPLETE])
    attempts = []

    async def test_caught(stack, prompts):
        """Nowhere."""

    async def body(live):
        attempts.append(live)
        most = 64 if len(attempts) >= enough_at else 4
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(live.generate([[5, 6, 7]], max_tokens=most, temperature=0.0, ignore_eos=True))
            for _ in range(times - 1):
                await live.until_generating(requests=1, tokens=1)
                await live.until(lambda seen: not seen.requests, "the request's end")
            await live.until_generating(requests=1, tokens=16)

    declared = declaration(made_up(test_caught))
    return declared, stack.drive(declared, body), attempts


def test_a_moment_that_was_missed_is_tried_again_and_checks_see_the_last_attempt(tmp_path):
    with bench(tmp_path / "run") as stack:
        declared, verdicts, attempts = catching(stack, enough_at=3)
        [trace] = stack.session.driven(declared, stack.seat(declared))
    assert (len(attempts), trace.end.attempts, trace.end.outcome) == (3, 3, "completed")
    assert {(v.check, v.status) for v in verdicts} == {
        ("all_complete", "pass"),
        ("clean_room", "pass"),
        ("conservation", "pass"),
        ("echo", "pass"),
        ("instruments", "pass"),
    }
    assert len(trace.own_calls) == 1


def test_requests_that_ended_before_they_were_awaited_again_are_a_missed_moment(tmp_path):
    with bench(tmp_path / "run") as stack:
        _, [verdict], attempts = catching(stack, enough_at=1, times=2)
    assert len(attempts) == 3
    assert (verdict.status, verdict.blame) == ("untestable", "harness")
    assert verdict.reason.startswith("could not be driven: MissedMoment: ")


def test_a_moment_that_is_always_missed_says_nothing_about_the_stack(tmp_path):
    with bench(tmp_path / "run") as stack:
        _, [verdict], attempts = catching(stack, enough_at=99)
        assert len(attempts) == 3
        assert (verdict.status, verdict.blame) == ("untestable", "harness")
        assert verdict.reason.startswith("could not be driven: MissedMoment: ")
        _, verdicts, _ = catching(stack, enough_at=1)  # the stack is as good as before
        assert {v.status for v in verdicts} == {"pass"}


def test_allowed_tokens_meet_their_moment_behind_a_router_that_passes_requests_on_one_by_one(tmp_path, monkeypatch):
    """The router of SkyRL 0.1.0 takes as long to pass 16 requests on as a tiny model takes to make 24 tokens."""
    monkeypatch.setattr(router, "HOP_S", 30 * STEP_S)
    with bench(tmp_path / "run") as stack:
        assert stack.red("tokens.test_allowed_tokens_bind_no_other_request") == {}
        trace = stack.trace("tokens.test_allowed_tokens_bind_no_other_request")
    assert trace.end.attempts == 1
    others = [call for call in trace.own_calls if call.label == "others"]
    allowed = [call for call in trace.own_calls if "allowed_token_ids" in call.request["sampling_params"]]
    assert len(allowed) == 3
    for one, first, after in zip(allowed, others[::2], others[1::2], strict=True):
        assert first.started_ns < one.started_ns < first.ended_ns < after.started_ns < after.ended_ns < one.ended_ns


# --- messages that come late ------------------------------------------------------------------------------------------


def test_an_adverse_schedule_is_recorded_and_ends_with_the_scenario(tmp_path):
    late = "control_plane.test_control_calls_reach_every_server_under_delays"
    with bench(tmp_path / "run") as stack:
        stack.drive(late)
        first = stack.trace(late)
        stack.drive("control_plane.test_control_calls_reach_every_server")
        after = stack.trace("control_plane.test_control_calls_reach_every_server")
    delays = [seen for seen in first.observations if seen.kind == "delay"]
    assert {seen.server for seen in delays} == {"server-0", "server-1"}
    assert {"request", "pause_generation", "resume_generation"} <= {seen.data["what"] for seen in delays}
    assert [call.request for call in first.own_calls if call.method == "delay"] == [{"seed": LATE_SEED}]
    assert not [seen for seen in after.observations if seen.kind == "delay" and seen.at_ns > after.began_ns]
