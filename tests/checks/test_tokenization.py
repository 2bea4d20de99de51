"""tokenize() and detokenize(): green on a correct recording, red on each fault."""

from __future__ import annotations

import pytest

from harness.checks.tokenization import DECODED, ENCODED, RENDERED, ROUND_TRIP
from tests.traces import call, decode, detokenize, encode, error, judge, render, tokenize

TEXTS = ["hello", "", "<|im_start|>user", " spaces  stay "]
IDS = [encode(t) for t in TEXTS]


def found(check, *calls):
    finding = judge(check, *calls)
    return finding.status, finding.reason


def test_there_and_back_is_green():
    calls = (tokenize(TEXTS, IDS), detokenize(IDS, TEXTS))
    assert [judge(c, *calls).facts for c in (ENCODED, DECODED, ROUND_TRIP)] == [4, 4, 4]


@pytest.mark.parametrize("ids", [IDS[::-1], IDS[:3], [*IDS[:3], [9]], [IDS[0], [0], *IDS[2:]], []])
def test_other_tokens_are_red(ids):
    assert found(ENCODED, tokenize(TEXTS, ids))[0] == "fail"


@pytest.mark.parametrize("texts", [TEXTS[::-1], TEXTS[:3], [decode(i) for i in IDS], ["x", *TEXTS[1:]], [*TEXTS, ""]])
def test_other_texts_are_red_there_and_back(texts):
    assert found(DECODED, detokenize(IDS, texts))[0] == "fail"
    assert found(ROUND_TRIP, tokenize(TEXTS, IDS), detokenize(IDS, texts)) == (
        "fail",
        "texts do not survive tokenize() and detokenize()",
    )


def test_errors_are_named_and_nothing_seen_is_untestable():
    broken = tokenize(TEXTS, None, error=error("HTTPError"))
    assert found(ENCODED, broken) == ("fail", "tokenize() failed with HTTPError: not like this")
    assert found(ROUND_TRIP, broken, detokenize(IDS, TEXTS)) == (
        "fail",
        "tokenize() failed with HTTPError: not like this",
    )
    assert {found(c)[0] for c in (ENCODED, DECODED, ROUND_TRIP)} == {"untestable"}
    assert found(ROUND_TRIP, tokenize(["a"], [encode("a")]), detokenize(IDS, TEXTS))[0] == "untestable"


SAID = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("ids", "status"), [(render(SAID), "pass"), (render(SAID)[:-1], "fail"), (encode("hello"), "fail"), (None, "fail")]
)
def test_a_conversations_prompt_is_the_templates(ids, status):
    failed = error("HTTPError") if ids is None else None
    rendered = call("render_chat", {"messages": SAID}, None if ids is None else {"token_ids": ids}, error=failed)
    assert found(RENDERED, rendered)[0] == status
