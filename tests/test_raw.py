"""What a stack's client returns is noted by its form before an adapter translates it, and compared by the contract's call."""

from __future__ import annotations

import asyncio
import collections
import inspect
import io
import json
import pickle
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.checks.base import Evidence
from harness.contract.errors import Blame
from harness.contract.messages import Empty, Generation, HealthResult
from harness.driving import raw
from harness.driving.host import Host
from harness.driving.process import read_answer
from harness.judging.causes import Why
from harness.judging.forms import FORM, METHODS
from harness.judging.parity import Judged, compare
from harness.records.argument_forms import USED_AGAIN
from harness.records.forms import Forms
from harness.records.recording import Call, Raw, decode_line
from harness.records.verdict import UNEXPLAINED, Concern, Parity, Verdict
from tests import miniature, traces
from tests.test_parity import BOOK, NOISE, SCENARIO, answer, both, side, verdict

# --- forms ----------------------------------------------------------------------------------------------------------


def form(*values: Any) -> dict[str, str]:
    forms = Forms()
    for value in values:
        forms.returned(value)
    return forms.found()


Point = collections.namedtuple("Point", "x")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, {"": "None"}),
        (True, {"": "bool"}),
        ("a", {"": "str"}),
        ([], {"": "list of 0"}),
        ([1, None, 2.0], {"": "list of 3", "[]": "None | float | int"}),
        ((1, 2), {"": "tuple of 2", "[]": "int"}),
        ({"ids": [[1, 2], []]}, {"": "dict", ".ids": "list of 2", ".ids[]": "list", ".ids[][]": "int"}),
        ([{"a": 1, "b": 2}, {"a": None}], {"": "list of 2", "[]": "dict", "[].a": "None | int", "[].b": "(not there) | int"}),
        ({"http://a:1": {"status": 200}, "http://a:2": {"status": 200}}, {"": "dict of 2", ".*": "dict", ".*.status": "int"}),
        ({"top": {" the": -0.5, "a": -1.0}}, {"": "dict", ".top": "dict of 2", ".top.*": "float"}),
        ({"top": {7: -0.5, 8: -1.0}}, {"": "dict", ".top": "dict of 2 by number", ".top.*": "float"}),
        (np.zeros((2, 3), np.float32), {"": "numpy.ndarray float32 rank 2"}),
        (np.int64(3), {"": "numpy.int64 int64 rank 0"}),
        (HTTPStatus.OK, {"": "http.HTTPStatus"}),
        (SimpleNamespace(a=1, _b=2), {"": "types.SimpleNamespace", ".a": "int"}),
        (HealthResult(healthy=True), {"": "harness.contract.messages.HealthResult", ".healthy": "bool"}),
        ({"ids": Point([1])}, {"": "dict", ".ids": "tests.test_raw.Point of 1", ".ids[]": "list", ".ids[][]": "int"}),
    ],
)  # fmt: skip
def test_the_form_of_a_value_has_its_types_keys_and_outer_lengths(value, found):
    assert form(value) == found


def test_forms_of_several_values_are_alternatives():
    assert form({"a": 1}, None, {"a": "x", "b": 1}) == {"": "None | dict", ".a": "int | str", ".b": "(not there) | int"}


def test_an_object_that_holds_itself_has_a_form_and_one_that_cannot_be_read_says_so():
    loop = SimpleNamespace()
    loop.itself = loop
    assert form(loop) == {"": "types.SimpleNamespace", ".itself": "types.SimpleNamespace"}

    class Odd(dict):
        def items(self):
            raise OSError

    assert "unreadable: OSError" in form(Odd(a=1))[""]


# --- noting ---------------------------------------------------------------------------------------------------------


class Client:
    """A client like those of the stacks."""

    def __init__(self) -> None:
        self.answer = {"response_ids": [[1]]}

    async def generate(self, batch: dict[str, Any], *, wait: asyncio.Event | None = None) -> dict[str, Any]:
        """The answer."""
        if wait is not None:
            await wait.wait()
        return self._checked(batch)

    def _checked(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not batch:
            raise LookupError("no batch")
        return self.answer

    async def pause(self, *args: Any, **options: Any) -> None: ...

    async def stream(self):
        yield 1

    @property
    def name(self) -> str:
        return "client"


BEFORE = inspect.signature(Client.generate)
raw.watch(Client)


async def noted(*calls: Any) -> list[Raw]:
    with raw.noting() as notes:
        await asyncio.gather(*calls, return_exceptions=True)
    return notes.noted()


@pytest.mark.asyncio
async def test_a_watched_client_does_what_it_did():
    client = Client()
    first = Client.generate
    raw.watch(Client)
    assert Client.generate is first
    assert inspect.signature(Client.generate) == BEFORE
    assert inspect.iscoroutinefunction(client.generate)
    assert Client.generate.__doc__ == "The answer."
    with raw.noting():
        assert await client.generate({"a": 1}) is client.answer
        assert [one async for one in client.stream()] == [1]
        with pytest.raises(LookupError, match="no batch"):
            await client.generate({})
    assert vars(pickle.loads(pickle.dumps(client))) == vars(client)
    assert client.name == "client"


@pytest.mark.asyncio
async def test_the_call_is_noted_and_not_what_the_client_asks_of_itself():
    [found] = await noted(Client().generate({"a": 1}), pickle.loads(pickle.dumps(Client())).generate(batch={"a": 1}))
    assert (found.method, found.arguments) == ("generate", ["batch"])
    assert found.forms == {
        "": "dict",
        ".response_ids": "list of 1",
        ".response_ids[]": "list",
        ".response_ids[][]": "int",
    }
    assert [one.arguments for one in await noted(Client().pause(1, mode="keep"))] == [["*args", "mode"]]
    assert [one.forms for one in await noted(Client().generate({}))] == [{"": "raises LookupError"}]
    with raw.noting() as notes, raw.aside():
        await Client().generate({"a": 1})
    assert notes.noted() == []


@pytest.mark.asyncio
async def test_calls_that_overlap_are_told_apart():
    release = asyncio.Event()
    slow = asyncio.create_task(noted(Client().generate({"a": 1}, wait=release)))
    fast = await noted(Client().pause())
    release.set()
    assert ([one.method for one in fast], [one.method for one in await slow]) == (["pause"], ["generate"])


@pytest.mark.asyncio
async def test_a_caller_may_use_again_what_an_unanswered_call_was_given():
    release, waits, answered = asyncio.Event(), {"params": {"max_tokens": 4}}, {"params": {"max_tokens": 4}}
    await noted(Client().generate(answered))
    slow = asyncio.create_task(noted(Client().generate(waits, wait=release)))
    for _ in range(2):  # the task, and within it the call
        await asyncio.sleep(0)
    raw.ask_for(USED_AGAIN)
    release.set()
    await slow
    assert (waits, answered) == ({"params": {"max_tokens": 1}}, {"params": {"max_tokens": 4}})


@pytest.mark.asyncio
async def test_a_watched_part_that_uses_the_client_hides_none_of_its_calls():
    class Generator:
        async def generate(self) -> list[Any]:
            return [await Client().generate({"a": 1})]

    raw.watch(Generator, "generator")
    assert [one.method for one in await noted(Generator().generate())] == ["generate", "generator.generate"]


@pytest.mark.asyncio
@pytest.mark.parametrize("batch", [{"a": 1}, {}])
async def test_the_hosts_answer_has_it_whether_the_call_succeeds_or_not(batch: dict[str, Any]):
    class Adapter:
        async def generate(self, _request: Any) -> Generation:
            ids = (await Client().generate(batch))["response_ids"]
            return Generation(response_ids=ids, responses=None, stop_reasons=["stop"])

        async def resume(self, _request: Empty) -> Empty:
            return Empty()

    host = Host(Adapter(), io.StringIO())
    answered = read_answer("generate", await host.call("generate", b"{}"))
    assert [one.forms[""] for one in answered.raw] == ["dict" if batch else "raises LookupError"]
    assert (answered.error is None) == bool(batch)
    assert read_answer("resume", await host.call("resume", b"{}")).raw == []


def test_a_recording_has_it_and_older_ones_are_read_without(tmp_path):
    with miniature.bench(tmp_path) as bench:
        bench.drive("weight_sync.test_a_sync_in_chunks_equals_the_whole")
        trace = bench.trace("weight_sync.test_a_sync_in_chunks_equals_the_whole")
    found = {call.method: call.raw for call in trace.own_calls}
    assert {method: [one.method for one in said] for method, said in found.items()} == {
        "generate": ["generate"],
        "sync_weights": ["synced", "update_named_weights"],
        "digests": [],
    }
    line = msgspec.json.encode(trace.own_calls[0])
    older = {name: value for name, value in json.loads(line).items() if name != "raw"}
    assert decode_line(line) == trace.own_calls[0]
    assert decode_line(msgspec.json.encode(older)).raw is None


# --- judging --------------------------------------------------------------------------------------------------------

IDS = {"": "dict", ".response_ids": "list of 1", ".response_ids[]": "list", ".response_ids[][]": "int"}
ITEMS = {".top": "list of 1", ".top[]": "dict", ".top[].a": "int"}


def told(
    call: Call, forms: dict[str, str] | None, method: str = "generate", arguments: tuple[str, ...] = ("batch",)
) -> Call:
    said = [] if forms is None else [Raw(method=method, arguments=list(arguments), forms=forms)]
    return msgspec.structs.replace(call, raw=said)


def compared(left: dict[str, str], right: dict[str, str], **about: Any) -> dict[str, Verdict]:
    return both([told(answer(**about), left)], [told(answer(**about), right)])


def test_equal_forms_are_parity_and_recordings_without_them_give_no_verdict():
    found = compared(IDS, IDS)
    assert (found[FORM].status, found[FORM].facts) == (Parity.PARITY, 4)
    assert (found[METHODS].status, found[METHODS].facts) == (Parity.PARITY, 1)
    for left, right in (
        (answer(), told(answer(), IDS)),
        (answer(), answer()),
        (told(answer(), None), told(answer(), None)),
    ):
        assert not {FORM, METHODS} & both([left], [right]).keys()


@pytest.mark.parametrize(
    ("left", "right", "place", "causes"),
    [
        ({"": "None"}, {"": "int"}, "generate", {UNEXPLAINED: 1}),
        ({"": "None"}, {"": "dict of 2", ".*": "dict"}, "generate", {Why.BY_SERVER: 1}),
        ({"": "None"}, {"": "list of 2", "[]": "None"}, "generate", {Why.BY_SERVER: 1}),
        (IDS | {".top": "None"}, IDS | {".top": "list of 2"}, "generate.top", {f"{Why.FIELD}:top": 1}),
        ({"": "list of 2", "[]": "None"}, {"": "dict of 2", ".*": "dict"}, "generate", {Why.BY_SERVER: 1}),
        (IDS, {"": "dict", ".sequences": "list of 1"}, "generate", {Why.OTHER_FIELDS: 1}),
        (IDS, IDS | {".response_ids": "list of 2"}, "generate.response_ids", {UNEXPLAINED: 1}),
        (IDS, IDS | {".response_ids[][]": "numpy.int64"}, "generate.response_ids[][]", {UNEXPLAINED: 1}),
        (IDS, IDS | ITEMS, "generate.top", {f"{Why.FIELD}:top": 1}),
        (IDS | ITEMS, IDS | ITEMS | {".top[].a": "None"}, "generate.top[].a", {f"{Why.FIELD}:a": 1}),
        (IDS, IDS | {".experts": "None"}, "generate.experts", {Why.NULL: 1}),
        (IDS | {".token_ids": "None"}, IDS | {".token_ids": "list of 2"}, "generate.token_ids", {Why.NO_TOKEN_IDS: 1}),
    ],
)  # fmt: skip
def test_forms_that_differ_are_open_at_the_outermost_place(left, right, place, causes):
    for one, other in ((left, right), (right, left)):
        found = compared(one, other)[FORM]
        assert (found.status, found.causes) == (Parity.OPEN, causes)
        assert found.reason == f"outputs.form differ in {place}"
        assert [e["place"] for e in found.evidence] == [place]


def test_what_follows_from_the_content_of_an_answer_is_no_difference_of_form():
    empty = {place: form for place, form in IDS.items() if place != ".response_ids[][]"}
    assert compared(IDS, empty)[FORM].status == Parity.PARITY
    one, other = IDS | {".stop": "None"}, IDS | {".stop": "None | int"}
    assert compared(one, other, params={"temperature": 1.0})[FORM].status == Parity.PARITY
    assert compared(one, other)[FORM].status == Parity.OPEN
    lists = IDS | {".stop": "list of 1"}
    assert compared(one, lists, params={"temperature": 1.0})[FORM].status == Parity.OPEN


def test_a_form_in_which_the_baseline_differs_from_its_own_twin_is_noise():
    sides = [told(answer(), forms) for forms in (IDS, IDS | {".a": "int"}, IDS | {".a": "None"})]
    found = both(sides[:1], sides[1:2], twin=sides[2:])[FORM]
    assert (found.status, found.numbers["within_twin_noise"]) == (Parity.PARITY, 1)


@pytest.mark.parametrize("right", ["ValueError", "aiohttp.ClientError"])
def test_errors_are_compared_by_class(right: str):
    sides = [
        told(traces.generate([[5]], error=traces.error()), {"": f"raises {name}"}) for name in ("ValueError", right)
    ]
    found = both(sides[:1], sides[1:])[FORM]
    assert found.status == (Parity.PARITY if right == "ValueError" else Parity.OPEN)
    assert found.causes == ({} if right == "ValueError" else {Why.ERROR_CLASS: 1})


def test_a_call_that_failed_before_the_client_was_asked_tells_nothing():
    refused = told(traces.generate([[5]], error=traces.error()), None)
    raised = told(traces.generate([[5]], error=traces.error()), {"": "raises ValueError"})
    assert not {FORM, METHODS} & both([refused], [raised]).keys()


@pytest.mark.parametrize(("wrong", "differs"), [([], True), ([("asked", 0)], False), ([("other", None)], True)])
def test_a_call_that_a_failed_check_found_wrong_is_not_compared(wrong: list[Concern], differs: bool):
    old, new = (
        traces.trace(told(answer(label="asked"), forms), target=f"stack:{forms['']}") for forms in (IDS, {"": "None"})
    )
    fails = [verdict("fail", reason="wrong", blame=Blame.STACK, concerns=wrong)]
    failing = Judged(evidence=Evidence(new, BOOK), verdicts=fails, own=fails)
    found = {v.check: v.status for v in compare(SCENARIO, side(old), failing, None, NOISE)}
    assert found.get(FORM) == (Parity.OPEN if differs else None)


def test_a_client_with_another_method_is_compared_all_the_same_and_the_method_is_a_difference():
    def pause(method: str, *arguments: str, form: str = "None") -> Call:
        return told(traces.call("pause", {}), {"": form}, method, arguments)

    found = both([pause("pause_generation")], [pause("pause", "mode")])
    assert (found[FORM].status, found[METHODS].status) == (Parity.PARITY, Parity.OPEN)
    assert found[METHODS].causes == {Why.CLIENT_METHOD: 1}
    [shown] = found[METHODS].evidence
    assert (shown["baseline"], shown["candidate"]) == ("pause_generation()", "pause(mode)")
    assert both([pause("pause")], [pause("resume", form="dict")])[FORM].status == Parity.OPEN
    none = told(traces.call("pause", {}), None)
    found = both([pause("pause")], [none])
    assert (found[METHODS].causes, FORM in found) == ({Why.NO_CLIENT_METHOD: 1}, False)


def test_of_several_methods_those_of_both_clients_are_compared():
    def prepare(*methods: tuple[str, str]) -> Call:
        said = [Raw(method=name, arguments=[], forms={"": form}) for name, form in methods]
        return msgspec.structs.replace(traces.call("prepare_weight_sync", {}), raw=said)

    found = both([prepare(("init", "None"), ("size", "int"))], [prepare(("init", "dict"))])
    assert found[FORM].reason == "outputs.form differ in prepare_weight_sync: init"
    assert found[METHODS].status == Parity.OPEN
