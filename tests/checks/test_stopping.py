"""Finish reasons, lengths, stop strings and texts: green on a correct recording, red on each fault."""

from __future__ import annotations

import msgspec
import pytest

from harness.checks.stopping import CUT_SHORT, ends_as_asked, stop_text
from harness.checks.text import REPLACEMENT, text_of_tokens
from harness.contract.vocabulary import TINY
from harness.records.reference import DecodeRequest, Text
from tests.checks.scene import Scene
from tests.traces import FakeReference, decode, error, executed, generate, judge

EOS = 2
PASSED_OFF = "an output that was cut short is returned as one that has reached its length"
PROMPT = [3, 4, 5]


def one(tokens, reason, text=None, **params):
    about = {"max_tokens": 5} | params
    texts = [decode(tokens) if text is None else text]
    return generate([PROMPT], [tokens], stop_reasons=[reason], responses=texts, params=about)


def found(check, *calls, reference=None):
    finding = judge(check, *calls, reference=reference)
    return finding.status, finding.reason


def ends(*causes, room=512):
    return ends_as_asked(max_model_len=room, causes=causes)


def test_each_cause_is_green():
    calls = [
        one([9, 9, 9, 9, 9], "length"),
        one([9, 9, 20], "stop", stop_token_ids=[20, 21]),
        one([9, EOS], "stop"),
        one([9, EOS, 9, 9, EOS], "length", ignore_eos=True),
        one([9, 20, 9, 20], "stop", stop_token_ids=[20], min_tokens=3),
        one([9, 30, 31], "stop", decode([9]), stop=decode([30, 31])),
    ]
    assert judge(ends("length", "stop token", "eos", "stop string"), *calls).facts == 12


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (one([9, 9, 9, 9], "length"), "output ended before anything that was to end it"),
        (one([9] * 6, "length"), "output went on after its length"),
        (one([9] * 5, "stop"), "an output ended by length does not have the finish reason 'length'"),
        (one([9] * 5, "abort"), "an output ended by length does not have the finish reason 'length'"),
        (one([9, 20, 9, 9, 9], "length", stop_token_ids=[20]), "output went on after its stop token"),
        (
            one([9, 20], "length", stop_token_ids=[20]),
            "an output ended by stop token does not have the finish reason 'stop'",
        ),
        (one([9, 9], "stop", stop_token_ids=[20]), "output ended before anything that was to end it"),
        (one([9, EOS, 9, 9, 9], "length"), "output went on after its eos"),
        (one([9, EOS], "stop", ignore_eos=True), "output ended before anything that was to end it"),
        (one([9, 20], "stop", stop_token_ids=[20], min_tokens=3), "output was stopped before min_tokens"),
        (one([9, 30, 31, 9, 9], "length", stop=[decode([30, 31])]), "output went on after its stop string"),
        (one([30, 31, 9], "stop", stop=[decode([30, 31])]), "output went on after its stop string"),
        (generate([PROMPT], None, error=error("OSError")), "generate() failed with OSError: not like this"),
        (
            generate([PROMPT], [[9] * 5], stop_reasons=[None], params={"max_tokens": 5}),
            "generate() returned a result without a finish reason",
        ),
        (
            generate([PROMPT], [[9] * 5], stop_reasons=[], params={"max_tokens": 5}),
            "generate() returned another number of stop_reasons than of results",
        ),
    ],
)
def test_each_wrong_end_is_red(call, reason):
    assert found(ends("length"), call) == ("fail", reason)


def test_the_context_is_a_length_too():
    assert found(ends("length", room=5), one([9, 9], "length"))[0] == "pass"
    assert found(ends("length", room=5), one([9, 9, 9], "length")) == ("fail", "output went on after its length")


def test_a_cause_that_never_came_and_no_call_are_untestable():
    assert found(ends("length", "eos"), one([9] * 5, "length")) == ("untestable", "no output was ended by eos")
    assert found(ends("length"))[0] == "untestable"
    assert found(stop_text(), one([9] * 5, "length"))[0] == "untestable"
    assert found(text_of_tokens())[0] == "untestable"


STOP = decode([30, 31])


def test_stop_strings_in_texts():
    without = one([9, 30, 31], "stop", decode([9]), stop=[STOP])
    including = one([9, 30, 31], "stop", decode([9, 30, 31]), stop=[STOP], include_stop_str_in_output=True)
    assert judge(stop_text(), without, including).facts == 2
    kept = one([9, 30, 31], "stop", stop=[STOP])
    assert found(stop_text(), kept) == ("fail", "text holds the stop string, which was to be left out")
    lost = one([9, 30, 31], "stop", decode([9]), stop=[STOP], include_stop_str_in_output=True)
    assert found(stop_text(), lost) == ("fail", "text lacks the stop string, which was to be included")
    short = one([9, 10, 30, 31], "stop", decode([9]), stop=[STOP])
    assert found(stop_text(), short) == ("fail", "text does not end where the stop string says")


def test_two_stop_strings_that_end_within_one_token():
    """The last token is of two letters. One string ends with its first letter, the other with its second."""
    whole = decode([9, 30, 31])
    first, second = whole[-3:-1], whole[-2:]
    for stop in ([first, second], [second, first]):
        right = one([9, 30, 31], "stop", whole[:-3], stop=stop)
        assert found(stop_text(), right)[0] == "pass"
        late = one([9, 30, 31], "stop", whole[:-2], stop=stop)
        assert found(stop_text(), late) == ("fail", "text does not end where the stop string says")
    alone = one([9, 30, 31], "stop", whole[:-2], stop=[second, "other"])
    assert found(stop_text(), alone) == ("untestable", "no two stop strings ended within one token")


SPECIAL = [9, 0, 1, 10, 11]


def test_text_is_the_decoded_tokens():
    skipped = one(SPECIAL, "length")
    kept = one(SPECIAL, "length", decode(SPECIAL, skip_special_tokens=False), skip_special_tokens=False)
    assert judge(text_of_tokens(special=True), skipped, kept).facts == 2


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            one(SPECIAL, "length", decode(SPECIAL, skip_special_tokens=False)),
            "text holds special tokens that were to be skipped",
        ),
        (one(SPECIAL, "length", skip_special_tokens=False), "text lacks special tokens that were asked for"),
        (one(SPECIAL, "length", "hello"), "text is not the decoding of the tokens"),
        (one(SPECIAL, "length", ""), "text is not the decoding of the tokens"),
        (one(SPECIAL, "length", decode(SPECIAL) + "x"), "text is not the decoding of the tokens"),
        (one([9, 0, 20], "stop", decode([9]), stop_token_ids=[20]), "text lacks the stop token that the tokens hold"),
        (
            generate([PROMPT] * 2, [SPECIAL] * 2, responses=["x"]),
            "generate() returned another number of responses than of results",
        ),
    ],
)
def test_text_of_other_tokens_is_red(call, reason):
    assert found(text_of_tokens(special=True), call) == ("fail", reason)


def test_a_character_that_was_cut_off_has_a_reason_of_its_own():
    reference = FakeReference()
    for skip in (True, False):
        reference.set(DecodeRequest(tokens=[9, 40], skip_special_tokens=skip), Text(text="a" + REPLACEMENT))
    cut = one([9, 40], "length", "a", max_tokens=2)
    assert found(text_of_tokens(), cut, reference=reference) == (
        "fail",
        "text and tokens differ in a character that the output was cut off in",
    )


SPACE = TINY.one_space


@pytest.mark.parametrize(
    ("text", "cleans", "reason"),
    [
        ("a .", False, ""),
        ("a .", True, ""),
        ("a.", True, ""),
        (" a .", False, "text begins with a space that the decoding of its tokens leaves out"),
        (" a .", True, "text begins with a space that the decoding of its tokens leaves out"),
        (" a.", True, "text is not the decoding of the tokens"),
        ("a.", False, "text is not the decoding of the tokens"),
        ("a", True, "text is not the decoding of the tokens"),
    ],
)
def test_spaces_that_a_tokenizer_leaves_out(text, cleans, reason):
    """It decodes the tokens to "a ."; `cleans`: the checkpoint asks for a clean-up."""
    tokens, reference = [SPACE, 9, SPACE, 10], FakeReference()
    for cut in (tokens, tokens[:-1]):
        for skip in (True, False):
            reference.set(
                DecodeRequest(tokens=cut, skip_special_tokens=skip), Text(text="a ." if cut == tokens else "a ")
            )
    vocabulary = msgspec.structs.replace(TINY, cleans=cleans)
    call = one(tokens, "length", text, max_tokens=4)
    finding = judge(text_of_tokens(spaced=True), call, reference=reference, vocabulary=vocabulary)
    assert (finding.status, finding.reason) == ("fail" if reason else "pass", reason)


def test_a_space_must_have_begun_an_output():
    assert found(text_of_tokens(spaced=True), one([9] * 5, "length"))[0] == "untestable"


def test_special_tokens_must_have_occurred():
    assert found(text_of_tokens(special=True), one([9] * 5, "length"))[0] == "untestable"


def test_causes_of_several_rows_are_named_together():
    texts = ["hello", decode(SPECIAL, skip_special_tokens=False)]
    call = generate([PROMPT] * 2, [SPECIAL] * 2, responses=texts, params={"max_tokens": 5})
    assert found(text_of_tokens(), call)[1] == (
        "text holds special tokens that were to be skipped; text is not the decoding of the tokens"
    )


@pytest.mark.parametrize(
    ("tokens", "reason", "ran", "expected"),
    [
        ([9, 9], "length", "abort", ("fail", PASSED_OFF)),
        ([9, 9], "abort", "abort", ("pass", "")),
        ([9] * 5, "length", "abort", ("pass", "")),
        ([9, 9], "length", "length", ("untestable", "no request was cut short")),
    ],
)
def test_an_output_that_was_cut_short_is_not_called_whole(tokens, reason, ran, expected):
    scene = Scene()
    started = scene.pass_time()
    scene.seen += executed(PROMPT, [9, 9], reason=ran, from_ns=scene.pass_time(), params={"max_tokens": 5})
    scene.calls.append(msgspec.structs.replace(one(tokens, reason), started_ns=started, ended_ns=scene.pass_time()))
    found = scene.judge(CUT_SHORT)
    assert (found.status, found.reason) == expected
