"""Open differences have names: a cause that both recordings tell, an entry with its released source, or a place in the gate."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.checks.base import Evidence
from harness.contract.errors import UsageError
from harness.judging import headers
from harness.judging.causes import Asked, Why, of_failure, of_form, of_place
from harness.judging.facets import NOT_THERE, WHOLE, outputs, side_by_side
from harness.judging.gate import decide
from harness.judging.open_differences import Entry, by_cause, load
from harness.judging.pairing import pair
from harness.judging.sides import lay_side_by_side
from harness.records.forms import Forms
from harness.records.verdict import UNEXPLAINED
from harness.suite.plan import load_plan
from harness.suite.profiles import named
from tests import synthetic, traces
from tests.synthetic import HTTP, LEGACY, verdict

PAIR = f"{LEGACY}~{HTTP}"


def begins(one: list[Any], other: list[Any]) -> bool:
    return all(a == b for a, b in zip(one, other, strict=False))


def why(
    facet: str, baseline: Any, candidate: Any, *, place: str = "row 0", method: str = "generate", **about: Any
) -> list[str]:
    params = about.pop("params", {})
    call = (
        traces.generate([[5]], [[6]], params=params)
        if method == "generate"
        else traces.call(method, {"sampling_params": params})
    )
    known = {
        "call": call,
        "same_tokens": True,
        "tokens": 5,
        "cut": isinstance(baseline, list) and isinstance(candidate, list) and begins(baseline, candidate),
        "stopped": False,
        "synced": False,
        "paused": False,
        "slept": False,
        "aborted": False,
        "trained": False,
        "allowed_to_another": False,
    } | about
    both = of_place(facet, place, baseline, candidate, Asked(**known))
    assert set(both) == set(of_place(facet, place, candidate, baseline, Asked(**known))), (
        "it does not matter which side is which"
    )
    return sorted(both)


def test_tokens_that_a_sleep_cut():
    assert why("outputs.tokens", [3, 4], [3], slept=True) == [Why.CUT_BY_SLEEP]
    assert why("outputs.tokens", [3, 4], [3], paused=True, aborted=True) == [Why.CUT_BY_PAUSE]
    assert why("outputs.tokens", [3, 4], [3], paused=True) == []
    assert why("outputs.stop_reasons", "length", "stop", slept=True) == []
    assert why("outputs.stop_reasons", "length", "stop", slept=True, same_tokens=False) == [Why.CUT_BY_SLEEP]
    assert why("outputs.tokens", [3, 4], [4], paused=True, aborted=True) == []
    assert why("weights.digests", "a", "b", trained=True) == [Why.TRAINED]


def test_answers_of_another_length():
    seeded = {"seed": 3, "temperature": 1.0}
    assert why("outputs.tokens", [3, 4], [3], method="sample", params=seeded) == [Why.OTHER_LENGTH]
    assert why("outputs.tokens", [3, 4], [3], params={"max_tokens": None}) == [Why.OTHER_LENGTH]
    assert why("outputs.tokens", [3, 4], [3], method="sample", params=seeded | {"max_tokens": 2}) == []
    assert why("outputs.tokens", [3, 4], [4], method="sample", params=seeded) == [Why.DRAWS]
    ended = {"same_tokens": False, "cut": True}
    assert why("outputs.stop_reasons", "length", "stop", **ended) == [Why.OTHER_LENGTH]
    assert why("outputs.stop_reasons", "length", "stop", **ended, params={"max_tokens": 2}) == []


def test_what_follows_from_tokens_to_which_another_request_was_bound():
    bound = [Why.ALLOWED_TO_ANOTHER]
    assert why("outputs.tokens", [3, 4], [1, 4], allowed_to_another=True) == bound
    assert why("outputs.stop_reasons", "length", "stop", allowed_to_another=True) == bound
    for field in ("text", "message.content", "finish_reason", "stop_reason"):
        assert why("outputs.bodies", "a", "b", place=f"choices[0].{field}", allowed_to_another=True) == bound
    assert why("outputs.bodies", 1, 392, place="choices[0].token_ids[0]", allowed_to_another=True) == bound
    assert why("outputs.bodies", 1, 392, place="choices[0].prompt_token_ids[0]", allowed_to_another=True) == []
    assert why("outputs.bodies", 3, 1, place="usage.completion_tokens", allowed_to_another=True) == bound
    assert why("outputs.bodies", "a", "b", place="model", allowed_to_another=True) == []
    assert why("outputs.tokens", [3, 4], [1, 4]) == []


@pytest.mark.parametrize(
    ("beside", "mine", "token", "causes"),
    [
        ({"allowed_token_ids": [1, 2]}, {}, 1, [Why.ALLOWED_TO_ANOTHER]),
        ({"allowed_token_ids": [1, 2], "server": "server-1"}, {}, 1, []),
        ({"allowed_token_ids": [1, 2]}, {}, 9, []),
        ({}, {}, 1, []),
        ({"allowed_token_ids": [1]}, {"stop_token_ids": [1, 3], "min_tokens": 1}, 0, [Why.ALLOWED_TO_ANOTHER]),
        ({"allowed_token_ids": [1]}, {"stop_token_ids": [1, 3]}, 0, []),
        ({"allowed_token_ids": [1, 2]}, {"stop_token_ids": [1, 3], "min_tokens": 1}, 0, []),
    ],
    ids=["bound", "elsewhere", "not to this token", "nothing is bound", "none is left", "they may stop", "one is left"],
)
def test_a_token_to_which_another_request_was_bound_is_told_from_the_engines(beside, mine, token, causes):
    drawn = {"temperature": 1.0, "seed": 7}
    own = drawn | mine
    server = beside.pop("server", "server-0")

    def stack(token: int) -> Evidence:
        other = traces.executed([8, 8], [1], params=beside, server=server, from_ns=20)
        rows = [
            traces.executed([5, n], [token if n else 4, 4], params=own if n else drawn, from_ns=21 + n) for n in (0, 1)
        ]
        call = traces.generate([[5, 0], [5, 1]], [[4, 4], [token, 4]], params=drawn, started_ns=10, ended_ns=99)
        return Evidence(traces.trace(call, observations=[*other, *rows[0], *rows[1]]), traces.FakeReference())

    for pair_ in ((stack(3), stack(token)), (stack(token), stack(3))):
        [difference] = lay_side_by_side(*pair_, None, 0.0).facets["outputs.tokens"].differences
        assert (difference.place, [*difference.why]) == ("row 1", causes)


def test_a_call_that_fails_on_one_stack_only():
    empty, full = traces.generate([], []), traces.generate([[5]], [[6]])
    assert of_failure(full, one_sided=False, met=(Why.HOP_BROKEN,)) == (Why.ERROR_CLASS,)
    assert of_failure(empty, one_sided=True, met=()) == (Why.EMPTY_BATCH,)
    assert of_failure(traces.sample([5], [], num_samples=0), one_sided=True, met=()) == (Why.NO_SAMPLES,)
    assert of_failure(full, one_sided=True, met=(Why.SERVER_DIED,)) == (Why.SERVER_DIED,)
    assert of_failure(full, one_sided=True, met=()) == ()


@pytest.mark.parametrize(
    ("place", "synced", "causes"),
    [
        ("choices[0].text", True, [Why.SYNC_IN_FLIGHT]),
        ("choices[0].message.content", True, [Why.SYNC_IN_FLIGHT]),
        ("choices[0].text", False, []),
        ("usage.completion_tokens", True, []),
        ("choices[0].finish_reason", True, []),
    ],
)
def test_a_sync_changes_the_text_of_a_body_and_nothing_else_in_it(place, synced, causes):
    assert why("outputs.bodies", "a b", "a c", place=place, method="completion", synced=synced) == causes


@pytest.mark.parametrize(
    ("baseline", "candidate", "about", "causes"),
    [
        ("", "\N{REPLACEMENT CHARACTER}x", {"stopped": True, "tokens": 3}, [Why.CUT_CHARACTER, Why.STOP_TOKEN]),
        ("", "\N{REPLACEMENT CHARACTER}xy", {"stopped": True, "tokens": 3}, []),
        ("", "\N{REPLACEMENT CHARACTER}x", {"stopped": True, "tokens": 5}, []),
        ("a b", "a <|im_end|>b", {}, [Why.SPECIAL_TOKENS]),
        ("a b", "a b\N{REPLACEMENT CHARACTER}", {}, [Why.CUT_CHARACTER]),
        ("a b", "a <|im_end|>b\N{REPLACEMENT CHARACTER}", {}, [Why.CUT_CHARACTER, Why.SPECIAL_TOKENS]),
        ("a b", "a b\n", {}, [Why.OUTER_SPACE]),
        ("a b", " a b", {}, [Why.FIRST_SPACE]),
        (" a , b", " a, b", {}, [Why.CLEANED]),
        (" a , b", "a, b", {}, [Why.CLEANED, Why.FIRST_SPACE]),
        ("a b", "a bSTOP", {"params": {"stop": "STOP"}}, [Why.STOP_STRING]),
        ("a b", "a bSTOP", {}, []),
        ("a b", "a b#", {"stopped": True}, [Why.STOP_TOKEN]),
        ("prompt's end, a b", "a b", {}, [Why.PROMPT]),
        ("aʹb", "a\N{REPLACEMENT CHARACTER}<|im_end|>\N{REPLACEMENT CHARACTER}b", {}, [Why.SPLIT_CHARACTER]),
        ("", "#", {"stopped": True, "tokens": 1}, [Why.STOP_TOKEN]),
        ("", "a whole answer", {"stopped": True}, []),
        ("", "a whole answer", {}, []),
        ("a b", "a c", {}, []),
        ("a b", "c a b d", {}, []),
        ("a b", "a c", {"same_tokens": False}, [Why.OTHER_TOKENS]),
        ("a b", NOT_THERE, {}, [Why.NO_TEXT]),
        ("", "a b", {"params": {"detokenize": False}}, [Why.UNASKED_TEXT]),
        ("a", "a b", {"params": {"detokenize": False}}, []),
    ],
)
def test_the_cause_of_two_texts(baseline, candidate, about, causes):
    assert why("outputs.text", baseline, candidate, **about) == causes


SEEDED = {"seed": 3, "temperature": 1.0}


@pytest.mark.parametrize(
    ("about", "causes"),
    [
        ({"synced": True}, [Why.SYNC_IN_FLIGHT]),
        ({"paused": True, "params": SEEDED}, [Why.DRAWS]),
        ({"method": "sample", "params": SEEDED}, [Why.DRAWS]),
        ({"params": SEEDED}, []),
        ({"paused": True, "params": {"seed": 3, "temperature": 0.0}}, []),
        ({}, []),
    ],
)
def test_the_cause_of_other_tokens(about, causes):
    assert why("outputs.tokens", [1, 2], [1, 3], **about) == causes
    assert why("outputs.tokens", [1, 2], NOT_THERE, **about) == []


@pytest.mark.parametrize(
    ("place", "value", "causes"),
    [
        ("usage.prompt_tokens_details", None, [Why.NULL]),
        ("choices[0].token_ids[3]", 7, [Why.NO_TOKEN_IDS]),
        ("choices[0].index", 7, [f"{Why.FIELD}:index"]),
        (".rollout_metrics.generate/turns", 7, [f"{Why.FIELD}:generate/turns"]),
        ("logits[7]", 7, []),
    ],
)
def test_the_cause_of_a_field_that_one_body_lacks(place, value, causes):
    assert why("outputs.bodies", NOT_THERE, value, place=place) == causes
    assert why("outputs.bodies", 1, 2, place=place) == []


def test_what_one_side_lacks_of_a_body_is_one_place():
    def asked(*choices: dict[str, Any]):
        return traces.openai("chat_completion", {"temperature": 0}, {"choices": list(choices), "usage": {"total": 3}})

    content = {"content": [{"token": "a", "bytes": [97]}, {"token": "b", "bytes": [98]}]}
    whole, fewer = asked({"logprobs": content}), asked({"logprobs": {"content": content["content"][:1]}})
    usage = {"usage.total": 3}
    for lacking, has, place in (
        (asked({"logprobs": None}), {"choices[0].logprobs": None}, "choices[0].logprobs"),
        (asked({}), {"choices[0]": {}}, "choices[0].logprobs"),
        (asked(), {"choices": []}, "choices[0]"),
    ):
        ours, theirs, twins = (one["outputs.bodies"] for one in side_by_side(whole, lacking, fewer))
        assert ours == twins == usage | {place: WHOLE}
        assert theirs == usage | has
        assert [one["outputs.bodies"] for one in side_by_side(lacking, whole)] == [theirs, ours]
    ours, theirs = (one["outputs.bodies"] for one in side_by_side(whole, fewer))
    first = {"choices[0].logprobs.content[0].token": "a", "choices[0].logprobs.content[0].bytes[0]": 97}
    assert theirs == usage | first
    assert ours == usage | first | {"choices[0].logprobs.content[1]": WHOLE}
    assert side_by_side(whole, whole, None) == [outputs(whole), outputs(whole), {}]


def opened(name: str, **causes: int):
    return verdict("ordering", name, "outputs.text", HTTP, baseline=LEGACY, status="open", causes=causes)


@pytest.mark.parametrize(
    ("place", "baseline", "candidate", "causes"),
    [
        ("choices[1].logprobs.tokens[11]", "", "ա", [Why.TOKEN_TEXT]),
        ("choices[1].logprobs.top_logprobs[11].", -0.9, NOT_THERE, [Why.TOKEN_TEXT]),
        ("choices[1].logprobs.top_logprobs[11].ա", NOT_THERE, -0.9, [Why.TOKEN_TEXT]),
        ("choices[1].logprobs.tokens[11]", "a", "ա", []),
        ("choices[1].logprobs.top_logprobs[11].ab", NOT_THERE, -0.9, []),
        ("choices[1].logprobs.token_logprobs[11]", -0.9, -0.8, []),
        ("choices[0].logprobs.content[2].top_logprobs[3].token", "ա", "", [Why.TOKEN_TEXT]),
        ("choices[0].logprobs.content[2].top_logprobs[3].token", "a", "", []),
        ("choices[0].logprobs.content[2].token", "ա", "", [Why.TOKEN_TEXT]),
        ("choices[0].logprobs.content[2].bytes[0]", 213, NOT_THERE, [Why.TOKEN_TEXT]),
        ("choices[0].logprobs.content[2].bytes[0]", 97, NOT_THERE, []),
        ("choices[0].logprobs.content[2].bytes", NOT_THERE, [], [Why.TOKEN_TEXT]),
        ("choices[0].logprobs.content[2].top_logprobs[3].logprob", -0.9, -0.8, []),
        ("choices[0].prompt_logprobs[4].232.decoded_token", "ա", "", [Why.TOKEN_TEXT]),
        ("choices[0].prompt_logprobs[4].232.decoded_token", "a", "", []),
        ("choices[0].logprobs", WHOLE, None, [f"{Why.FIELD}:logprobs"]),
        ("choices[0].logprobs", WHOLE, NOT_THERE, [f"{Why.FIELD}:logprobs"]),
        ("choices[0].token_ids", WHOLE, None, [Why.NO_TOKEN_IDS]),
        ("choices[0].logprobs.content[2]", WHOLE, NOT_THERE, []),
    ],
)
def test_the_cause_of_the_texts_of_single_tokens_and_of_what_one_side_lacks(place, baseline, candidate, causes):
    assert why("outputs.bodies", baseline, candidate, place=place, method="completion") == causes


@pytest.mark.parametrize(
    ("place", "forms", "causes"),
    [
        (".system_fingerprint", ("None", "str"), (f"{Why.FIELD}:system_fingerprint",)),
        ("generate.env_metrics", (NOT_THERE, "list of dict"), (f"{Why.FIELD}:env_metrics",)),
        (".choices[]", (NOT_THERE, "dict"), ()),
        (".usage", ("int", "str"), ()),
        (".logprobs[]", ("dict of 4 by number", "dict of 4"), (Why.KEYS,)),
        (".logprobs[]", ("dict of 4 by number", "dict of 3"), ()),
    ],
)
def test_the_cause_of_a_form_that_one_result_lacks(place, forms, causes):
    assert causes_of_forms(place, *({place: form} if form != NOT_THERE else {} for form in forms)) == causes


def causes_of_forms(place: str, baseline: dict[str, str], candidate: dict[str, str]) -> tuple[str, ...]:
    found = of_form(place, baseline, candidate)
    assert found == of_form(place, candidate, baseline), "it does not matter which side is which"
    return found


EXPERTS = ".rollout_expert_indices[]"


def forms_of(value: Any) -> dict[str, str]:
    forms = Forms()
    forms.returned({"rollout_expert_indices": [value]})
    return forms.found()


@pytest.mark.parametrize(
    ("array", "lists", "causes"),
    [
        (np.zeros((5, 2, 4), np.uint8), np.zeros((5, 2, 4), int).tolist(), (Why.ARRAY,)),
        (np.zeros(3, np.float32), [0.5], (Why.ARRAY,)),
        (np.zeros((1, 1), bool), [[True]], (Why.ARRAY,)),
        (np.zeros((5, 2, 4), np.uint8), [[1, 2]], ()),
        (np.zeros((5, 2), np.uint8), [[[1, 2]]], ()),
        (np.zeros(3, np.uint8), [1.0], ()),
        (np.zeros(3, np.float32), [1], ()),
        (np.zeros(3, np.uint8), [1, None], ()),
        (np.zeros(3, np.uint8), [], ()),
        (np.zeros(3, np.uint8), (1, 2), ()),
        (np.uint8(3), 3, ()),
        (np.zeros(3, np.uint8), np.zeros(3, np.int64), ()),
    ],
    ids=str,
)
def test_an_array_in_place_of_lists_has_their_depth_and_their_kind_of_number(array, lists, causes):
    assert causes_of_forms(EXPERTS, forms_of(array), forms_of(lists)) == causes


@pytest.mark.parametrize(
    ("several", "causes"), [((2, 1), (Why.TUPLE,)), ((2.0, 1), ()), ([2, 1], ()), ((), ())], ids=str
)
def test_a_tuple_in_place_of_a_value_holds_values_of_its_kind(several, causes):
    assert causes_of_forms(EXPERTS, forms_of(2), forms_of(several)) == causes


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float8_e4m3fn", "float64"])
def test_an_array_of_any_framework_is_one(dtype):
    array = {EXPERTS: f"torch.Tensor {dtype} rank 1"}
    assert causes_of_forms(EXPERTS, array, {EXPERTS: "list of 3", f"{EXPERTS}[]": "float"}) == (Why.ARRAY,)
    assert causes_of_forms(EXPERTS, array, {EXPERTS: "list of 3", f"{EXPERTS}[]": "int"}) == ()


def test_causes_are_added_up_and_what_is_not_understood_comes_first():
    found = [
        opened("a", **{Why.CUT_CHARACTER: 3, Why.SPECIAL_TOKENS: 1}),
        opened("b", **{Why.CUT_CHARACTER: 2}),
        opened("c", **{UNEXPLAINED: 4}),
        verdict("ordering", "d", "evaluation", HTTP, baseline=LEGACY, status="open"),
        verdict("ordering", "e", "outputs.text", HTTP, baseline=LEGACY, status="parity"),
    ]
    entries = [Entry(cause=Why.CUT_CHARACTER, pair=PAIR, source="here")]
    lines = by_cause(found, entries)
    assert [(one.cause, one.verdicts, one.places, one.source) for one in lines] == [
        (UNEXPLAINED, 2, 5, ""),
        (Why.SPECIAL_TOKENS, 1, 1, ""),
        (Why.CUT_CHARACTER, 2, 5, "here"),
    ]
    assert by_cause(found, [Entry(cause=Why.CUT_CHARACTER, pair="other~pair", source="here")])[-1].source == ""


def test_the_gate_names_what_no_entry_explains():
    made = synthetic.judgement()
    lines = by_cause([opened("a", **{Why.CUT_CHARACTER: 3, UNEXPLAINED: 1})], [])
    reasons = decide(
        msgspec.structs.replace(made, open_causes=lines), load_plan(), synthetic.ledger(), named("removal")
    ).reasons
    where = f"1 verdict of {PAIR}, first in {lines[0].scenarios[0]}"
    assert {f"no cause explains an open difference: {where}", f"no entry for cut-character-in-text: {where}"} <= set(
        reasons
    )
    explained = [msgspec.structs.replace(one, source="here") for one in lines]
    reasons = decide(
        msgspec.structs.replace(made, open_causes=explained), load_plan(), synthetic.ledger(), named("removal")
    ).reasons
    assert not any("no cause" in reason or "no entry" in reason for reason in reasons)


def test_each_entry_names_its_source_in_the_release():
    for one in load():
        assert re.match(r"\S+\.(?:py|rs|in):\d+: \w", one.source), one.cause
        assert re.fullmatch(r"skyrl-(\S+):(legacy|http)~skyrl-(\S+):http", one.pair)


def test_an_entry_holds_for_another_pair_with_the_place_there(tmp_path):
    text = '[[difference]]\ncause = "no-text"\npair = "a~b"\nsource = "x.py:1: no text"\nalso."a~c" = "x.py:7"\n'
    (tmp_path / "d.toml").write_text(text)
    assert [(one.pair, one.source) for one in load(tmp_path / "d.toml")] == [
        ("a~b", "x.py:1: no text"),
        ("a~c", "x.py:7: no text"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[difference]]\ncause = "nobody knows"\npair = "a~b"\nsource = "x"', "nobody knows"),
        (2 * '[[difference]]\ncause = "no-text"\npair = "a~b"\nsource = "x.py:1: it is so"\n', "no-text of a~b twice"),
        ('[[difference]]\ncause = "no-text"\npair = "a~b"\nsource = "x"', "source of no-text"),
        ("=", "holds no open differences"),
        ('[[difference]]\ncause = "field-of-one-stack"\npair = "a~b"\nsource = "x.py:1: it is so"', "names no field"),
        (
            '[[difference]]\ncause = "no-text"\nfields = ["x"]\npair = "a~b"\nsource = "x.py:1: it is so"',
            "another cause's",
        ),
    ],
)
def test_what_is_malformed_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "d.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        load(tmp_path / "d.toml")


@pytest.mark.parametrize(
    ("theirs", "status", "causes"),
    [
        ({"Date": "later", "allow": "HEAD, GET", "server": "a"}, 200, {}),
        ({"date": "later", "allow": "GET", "server": "a"}, 200, {"allow": "get, head | get"}),
        ({"date": "later", "allow": "GET, HEAD", "Vary": "x", "server": "b"}, 200, {"server": "a | b", "vary": "(not there) | x"}),
        ({"allow": "GET, HEAD", "server": "a"}, 200, {"date": "any | (not there)"}),
        ({}, 404, {}),
    ],
)  # fmt: skip
def test_each_header_that_differs_is_a_cause_of_its_own(theirs, status, causes):
    """The statuses are the same, but for the last: then nothing is compared."""

    def asked(headers, status=200):
        request = {"method": "GET", "path": "/health", "headers": {}, "body": ""}
        return traces.trace(traces.call("http", request, {"status": status, "headers": headers, "body": ""}))

    left = asked({"date": "now", "allow": "GET, HEAD", "server": "a"})
    right = asked(theirs, status)
    found = headers.compare(left, right, pair(left, right).pairs)
    facet = found.get(headers.HEADERS)
    differences = facet.differences if facet else []
    assert {d.place: f"{d.baseline} | {d.candidate}" for d in differences} == causes
    assert [d.why for d in differences] == [(f"{Why.HEADER}:{name}",) for name in causes]
    assert (facet is None) == (status != 200)
