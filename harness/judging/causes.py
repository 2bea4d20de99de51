"""Why outputs differ that the contract leaves open, as far as the two recordings tell. Pure.

A cause is told from both values at one place and from what was asked. A difference without a cause is unexplained.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from harness.checks.text import cleaned
from harness.contract.gym_rule import SPECIAL
from harness.judging.facets import BODIES, NOT_THERE, STOP_REASONS, TEXT, TOKENS, WHOLE
from harness.records.forms import BY_NUMBER, OR
from harness.records.recording import Call

WITH = " with "
"""Before the fields of a result that shares none with the other stack's."""
MOST_ASCII = 127
MOST_BYTES = 4
"""Bytes of a character in UTF-8; a token may be a byte."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Why(StrEnum):
    """A kind of cause. Each pair of stacks that has one needs an entry in ``scenarios/open_differences.toml``."""

    SPECIAL_TOKENS = "special-tokens-in-text"
    """One text has special tokens that the other leaves out."""
    CUT_CHARACTER = "cut-character-in-text"
    """One text ends with a replacement character for bytes that are no whole character; the other leaves it out."""
    OUTER_SPACE = "outer-space-in-text"
    """One text ends with white space that the other leaves out."""
    FIRST_SPACE = "first-space-in-text"
    """One text begins with a space that the other leaves out: it was decoded after the prompt, the other alone."""
    CLEANED = "cleaned-up-text"
    """One text lacks spaces before punctuation that the other has: a tokenizer cleaned it up."""
    SPLIT_CHARACTER = "special-token-within-a-character"
    """A special token lies between the bytes of a character: the text that leaves it out joins them."""
    STOP_STRING = "stop-string-in-text"
    """One text ends with the stop string that ended it; the other leaves it out."""
    STOP_TOKEN = "stop-token-in-text"
    """One text ends with the text of the stop token that ended it; the other leaves it out."""
    PROMPT = "prompt-in-text"
    """One text begins with the end of the prompt."""
    OTHER_TOKENS = "text-of-other-tokens"
    """The tokens behind the texts differ, which is a difference of its own."""
    UNASKED_TEXT = "text-without-detokenization"
    """A request says detokenize=false: one stack returns an empty text, the other decodes the tokens all the same."""
    NO_TEXT = "no-text"
    """One stack returns no text for this call."""
    NULL = "null-or-left-out"
    """One body has a field that is null; the other leaves it out."""
    NO_TOKEN_IDS = "no-token-ids-in-body"
    """One body has the token ids that were asked for; the other leaves them out."""
    SYNC_IN_FLIGHT = "sync-in-flight"
    """A weight sync, or a load over its adapter, reached the request after another token than on the other stack."""
    CUT_BY_SLEEP = "cut-by-sleep"
    """The engines were put to sleep during the request, after another token than on the other stack."""
    CUT_BY_PAUSE = "cut-by-pause"
    """pause(abort) ended the answer after another token than on the other stack: one is the beginning of the other."""
    TRAINED = "another-trained-policy"
    """The same step of training, made in each stack's own environment, gave other weights: what follows is of two policies."""
    DRAWS = "draws-of-one-seed"
    """Sampled tokens of a request with a seed: several samples, or a pause in the middle. No release says what a seed draws then."""
    OTHER_LENGTH = "length-without-max-tokens"
    """A request names no max_tokens: one answer is the beginning of the other, which goes on."""
    ALLOWED_TO_ANOTHER = "tokens-allowed-to-another-request"
    """An engine gave a request tokens to which another request had been bound there (`allowed_token_ids`)."""
    OTHER_SERVERS = "sessions-on-other-servers"
    """The stacks spread the same sessions over their servers in different ways."""
    LOGPROBS_UNASKED = "log-probabilities-not-asked-for"
    """One stack returns log-probabilities although the request asks for none."""
    ERROR_CLASS = "error-of-another-class"
    """Both stacks refuse the call, with errors of different classes or statuses, or that blame different parameters."""
    CLIENT_METHOD = "other-client-method"
    """The clients offer the call under different names, or with different arguments."""
    CLIENT = "client-changes"
    """The clients are different classes. ``scenarios/client_changes.toml`` explains each change of the census."""
    NO_CLIENT_METHOD = "no-client-method"
    """One client has no method for the call: its adapter finds the answer elsewhere."""
    OTHER_FIELDS = "results-without-a-common-field"
    """Both clients return objects that have no field in common."""
    BY_SERVER = "answers-by-server"
    """A control call: one client returns a mapping from servers to their answers, another what its engines return, or None."""
    FIELD_IGNORED = "field-without-effect"
    """A field of a request shows no effect on one stack: neither at the engine nor in the form of the answer."""
    VALUE_REFUSED = "value-refused-by-one"
    """One stack refuses a value of a field by an error that names it; the other takes it."""
    FORM_REFUSED = "form-refused-by-one"
    """One stack refuses a form of an argument (a tuple, a NumPy number) by an error that names it; the other takes it as usual."""
    NO_ROUTE = "route-of-one-stack"
    """The address of one stack lacks a route or a method that the other's has."""
    REFUSED_BY_ONE = "request-refused-by-one"
    """One stack refuses a call by an error that a check of the scenario found right; the other answers it, which is right too."""
    REFUSED_ELSEWHERE = "refused-at-another-place"
    """A call fails: on one stack before an engine takes any row of it, on the other after an engine took some."""
    ASKED_AGAIN = "failed-call-asked-again"
    """A call fails: one stack gives an engine a row of it again, the other does not."""
    INTERRUPTED = "attempts-after-an-interruption"
    """A pause meets the call, and the stacks give its rows to an engine a different number of times."""
    EMPTY_BATCH = "empty-batch-refused"
    """One stack refuses a batch without prompts; the other returns nothing for it."""
    NO_SAMPLES = "no-samples-refused"
    """One stack refuses sample() with num_samples=0; the other returns nothing for it."""
    SERVER_DIED = "dead-server-asked-or-left"
    """A server has died: one stack asks again elsewhere; on the other the call fails, or had not met the dead server; so other
    requests run at once."""
    HOP_BROKEN = "broken-hop-asked-again-or-left"
    """A call meets a broken hop: it fails on one stack; the other asks again, or has no such hop."""
    OTHER_SPREAD = "requests-on-other-servers"
    """The stacks spread the same number of requests over their servers in different ways."""
    ONE_BY_ONE = "rows-one-after-another"
    """One stack runs the rows of a call one after another; the other runs them at once."""
    STAGGERED = "late-at-the-engines"
    """Some requests reach one stack's engines so late that other requests have ended before."""
    SLOW_TO_FAIL = "slow-to-fail"
    """A call fails on the candidate, after several times as long as it takes on the baseline."""
    QUICK_TO_FAIL = "quick-to-fail"
    """A call fails on the candidate, in a fraction of the time that it takes on the baseline. Such a candidate is not faster."""
    CACHE_RESET_AT_SLEEP = "cache-reset-at-sleep"
    """One stack resets the prefix cache before it puts an engine to sleep, which drops the cache too."""
    CACHE_RESET = "cache-reset-by-one-stack"
    """In another control call one stack resets the prefix cache."""
    PAUSE_WITHIN = "pause-by-one-stack"
    """In this control call one stack pauses or resumes the engines."""
    SLEEP_WITHIN = "sleep-by-one-stack"
    """In this control call one stack puts engines to sleep or wakes them."""
    SYNC_STAGES = "stages-of-a-sync"
    """The stacks transfer weights, or load or unload an adapter, in different stages."""
    OTHER_ORDER = "other-order-of-steps"
    """The stacks make the same steps of a control call in another order."""
    OTHER_ARGUMENTS = "other-arguments-of-a-step"
    """The stacks make the same steps of a control call with other arguments."""
    FIELD = "field-of-one-stack"
    """One stack's answer has a value in a field that the other's lacks, or leaves null. The field's name follows after a colon: each
    has its own entry."""
    HEADER = "header-of-an-answer"
    """Answers at the two addresses differ in a header: one lacks it, or its value is another one. The header's name follows after a
    colon: each has its own entry."""
    PARAMETER = "parameter-at-the-engine"
    """The engines of the two stacks get other values of a sampling parameter for one call. The parameter's name follows after a colon:
    each has its own entry."""
    ARRAY = "array-in-place-of-lists"
    """One client returns an array, the other nested lists of the same depth with numbers of the same kind. Facets of outputs compare
    the numbers themselves."""
    ASKED_OF_ONE = "asked-of-one-stack"
    """The scenario asks for every key, option or field that a stack says it has, and one stack has more or other ones."""
    TUPLE = "tuple-in-place-of-a-value"
    """One client returns a value, the other a tuple of values of the same kind. What the adapter takes of it is compared by itself."""
    KEYS = "numbers-as-text-keys"
    """One client returns a mapping by number (by token id), the other the same mapping by text, as JSON has it."""
    TOKEN_TEXT = "text-of-a-token-within-a-character"
    """Beside log-probabilities: the text of a token that holds a part of a character only."""


def _without_stop_strings(text: str, call: Call) -> str:
    stops = (call.request.get("sampling_params") or {}).get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.removesuffix(stop)
    return text


_TEXTS: dict[Why, Callable[[str, Call], str]] = {
    Why.SPECIAL_TOKENS: lambda text, _: SPECIAL.sub("", text),
    Why.CUT_CHARACTER: lambda text, _: text.rstrip(REPLACEMENT),
    Why.OUTER_SPACE: lambda text, _: text.rstrip(),
    Why.FIRST_SPACE: lambda text, _: text.lstrip(" "),
    Why.CLEANED: lambda text, _: cleaned(text),
    Why.STOP_STRING: _without_stop_strings,
}
"""Cause → the text without what the cause adds to it."""
MADE = (".text", ".message.content")
"""Ends of the places of a body that hold what the model made."""
FOLLOWING = (*MADE, ".finish_reason", ".stop_reason", "usage.completion_tokens", "usage.total_tokens")
"""The same, with all that follows from the tokens that the model made."""
_FIELD = re.compile(r"\.?([A-Za-z_][^.\[\]\s]*)$")
"""The last name of a place, if the place ends with one."""
_BY_TOKEN = re.compile(r"\.logprobs\.((tokens|top_logprobs)\[|content\[.*\.(token|bytes)\b)|\.decoded_token$")
"""Places of log-probabilities that hold the text of a token: a completion's, a chat's, which has its bytes too, and a prompt's."""
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def _of_texts(baseline: str, candidate: str, asked: Asked) -> tuple[str, ...]:
    """The fewest causes that together make the texts equal; none if all of them do not."""
    if (asked.call.request.get("sampling_params") or {}).get("detokenize") is False and "" in (baseline, candidate):
        return (Why.UNASKED_TEXT,)
    for count in range(1, len(_TEXTS) + 1):
        for chosen in itertools.combinations(_TEXTS, count):
            left, right = baseline, candidate
            for why in chosen:
                left, right = _TEXTS[why](left, asked.call), _TEXTS[why](right, asked.call)
            if left == right:
                return chosen
    return _of_ends(_plain(baseline), _plain(candidate), asked) or _of_bytes(baseline, candidate)


def _plain(text: str) -> str:
    """Without what the simple causes add."""
    return SPECIAL.sub("", text).strip(REPLACEMENT).strip()


def _of_ends(one: str, other: str, asked: Asked) -> tuple[str, ...]:
    """An empty text begins and ends every other: it tells nothing unless the stop token was all, or all but a cut character."""
    shorter, longer = sorted((one, other), key=len)
    if asked.stopped and longer.startswith(shorter) and (shorter or asked.tokens == 1):
        return (Why.STOP_TOKEN,)
    if asked.stopped and not shorter and len(longer) <= 1 and asked.tokens <= MOST_BYTES:
        return (Why.CUT_CHARACTER, Why.STOP_TOKEN)
    return (Why.PROMPT,) if shorter and longer.endswith(shorter) else ()


def _of_bytes(baseline: str, candidate: str) -> tuple[str, ...]:
    if SPECIAL.search(baseline + candidate) is None:
        return ()
    left, right = (_NOT_ASCII.sub("", SPECIAL.sub("", text)) for text in (baseline, candidate))
    return (Why.SPLIT_CHARACTER,) if left == right else ()


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a difference in a call's outputs may come from, beside the values themselves."""

    call: Call
    same_tokens: bool
    """True if both sides have the same tokens at this place."""
    tokens: int
    """Number of tokens there, on the baseline's side."""
    cut: bool
    """True if one side's tokens there are the beginning of the other's."""
    stopped: bool
    """True if the answer there did not end by its length."""
    synced: bool
    """True if a weight sync overlaps the call on either side."""
    paused: bool
    """True if a pause overlaps the call on either side."""
    aborted: bool
    """True if the answer there ended by an abort on either side."""
    slept: bool
    """True if a sleep overlaps the call on either side."""
    trained: bool
    """True if an earlier step of training gave other weights on the other side."""
    allowed_to_another: bool
    """True if an engine gave it a token to which another request had been bound there, on either side."""


def of_place(facet: str, place: str, baseline: Any, candidate: Any, asked: Asked) -> tuple[str, ...]:
    """Causes of a difference at one place."""
    there = [value for value in (baseline, candidate) if value != NOT_THERE]
    one_sided = len(there) == 1
    lacks = one_sided or (WHOLE in there and None in there)
    found: tuple[str, ...] = ()
    if asked.allowed_to_another and (
        facet in {TOKENS, STOP_REASONS} or (facet == BODIES and (place.endswith(FOLLOWING) or ".token_ids[" in place))
    ):
        return (Why.ALLOWED_TO_ANOTHER,)
    if asked.trained:
        return (Why.TRAINED,)
    if (facet == TOKENS and not one_sided) or (facet == STOP_REASONS and not asked.same_tokens):
        found = _of_tokens(asked)
    elif facet == TEXT:
        if one_sided:
            found = (Why.NO_TEXT,)
        elif not asked.same_tokens:
            found = (Why.OTHER_TOKENS,)
        else:
            found = _of_texts(baseline, candidate, asked)
    elif facet == BODIES and not one_sided and asked.synced and place.endswith(MADE):
        found = (Why.SYNC_IN_FLIGHT,)
    elif one_sided and there[0] is None:
        found = (Why.NULL,)
    elif lacks and ("token_ids" in place or WHOLE in there):
        found = (Why.NO_TOKEN_IDS,) if "token_ids" in place else _of_field(place)
    elif _BY_TOKEN.search(place):
        found = (Why.TOKEN_TEXT,) if all(_partial(text) for text in _token_texts(place, there)) else ()
    elif one_sided:
        found = _of_field(place)
    return found


def _token_texts(place: str, there: list[Any]) -> list[Any]:
    """Texts of a token at a place of `_BY_TOKEN`: the key of a completion's mapping from tokens to numbers, or the values."""
    return [place.partition("].")[2].rpartition("].")[2]] if ".logprobs.top_logprobs[" in place else there


def _partial(text: Any) -> bool:
    """True if the text, its bytes or one byte of it has nothing that a token could only hold whole."""
    if isinstance(text, int | list):
        return all(byte > MOST_ASCII for byte in ([text] if isinstance(text, int) else text))
    return isinstance(text, str) and all(ord(character) > MOST_ASCII for character in text)


def _of_field(place: str) -> tuple[str, ...]:
    """The cause of a field that one side lacks: ".rollout_metrics.generate/turns", "choices[0].message.tool_calls"."""
    name = _FIELD.search(place)
    return (f"{Why.FIELD}:{name[1]}",) if name else ()


def of_failure(call: Call, *, one_sided: bool, met: tuple[str, ...]) -> tuple[str, ...]:
    """Causes of a call that fails on both stacks in other ways, or on one of them. `met`: what the scenario broke for the call on
    both stacks (`SERVER_DIED`, `HOP_BROKEN`)."""
    if not one_sided:
        return (Why.ERROR_CLASS,)
    if call.method == "generate" and not (call.request.get("prompt_token_ids") or call.request.get("prompts")):
        return (Why.EMPTY_BATCH,)
    if call.method == "sample" and call.request.get("num_samples") == 0:
        return (Why.NO_SAMPLES,)
    return met


def of_methods(baseline: str, candidate: str) -> tuple[str, ...]:
    """Causes of other calls to the clients."""
    return (Why.NO_CLIENT_METHOD,) if "none" in (baseline, candidate) else (Why.CLIENT_METHOD,)


_BY_SERVER = re.compile(r"dict of \d+ \| list of \d+|None \| (dict|list) of \d+")
"""Two forms of a control call's result."""


_ARRAY = re.compile(r"\S+ (?:torch\.)?b?(u?int|float|bool)\d*(?:_\w+)? rank ([1-9]\d*)")
"""Form of an array: kind of its numbers, number of dimensions."""


def of_form(place: str, baseline: Mapping[str, str], candidate: Mapping[str, str]) -> tuple[str, ...]:
    """Causes of a difference between two results that are no errors, each as place → form."""
    both = sorted(forms.get(place, NOT_THERE) for forms in (baseline, candidate))
    lacks = bool({"None", NOT_THERE} & set(both))
    kinds = {
        Why.OTHER_FIELDS: all(WITH in form for form in both),
        Why.BY_SERVER: not place and bool(_BY_SERVER.fullmatch(OR.join(both))),
        Why.ARRAY: _array_and_lists(place, baseline, candidate) or _array_and_lists(place, candidate, baseline),
        Why.TUPLE: _tuple_and_value(place, baseline, candidate) or _tuple_and_value(place, candidate, baseline),
        Why.NULL: set(both) == {"None", NOT_THERE},
        Why.KEYS: len({form.replace(BY_NUMBER, "") for form in both}) == 1,
        Why.NO_TOKEN_IDS: lacks and place.endswith("token_ids"),
    }
    why = next((kind for kind, found in kinds.items() if found), None)
    if why is not None:
        return (why,)
    return _of_field(place) if lacks else ()


def _array_and_lists(place: str, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """True if the first has an array at the place, and the other as many levels of lists as the array has dimensions."""
    array = _ARRAY.fullmatch(one.get(place, ""))
    if array is None:
        return False
    depth = int(array[2])
    levels = [other.get(place + "[]" * level, "").partition(" of ")[0] for level in range(depth + 1)]
    return levels == ["list"] * depth + [array[1].removeprefix("u")]


def _tuple_and_value(place: str, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """True if the first has a tuple at the place, and the other what the tuple holds."""
    return one.get(place, "").partition(" of ")[0] == "tuple" and one.get(place + "[]") == other.get(place)


def _of_tokens(asked: Asked) -> tuple[str, ...]:
    params = asked.call.request.get("sampling_params") or {}
    drawn = params.get("seed") is not None and (params.get("temperature") or 0) > 0
    if asked.cut and asked.paused and asked.aborted:
        return (Why.CUT_BY_PAUSE,)
    if asked.synced:
        return (Why.SYNC_IN_FLIGHT,)
    if asked.slept:
        return (Why.CUT_BY_SLEEP,)
    if asked.cut:
        return (Why.OTHER_LENGTH,) if params.get("max_tokens") is None and not asked.paused else ()
    return (Why.DRAWS,) if drawn and (asked.paused or asked.call.method == "sample") else ()
