"""Arguments in other forms: every form keeps the content, and changes one place only."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records.argument_forms import NO_NUMBERS, formed, places

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([0.0, 0.5, 2.0]) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner),
    max_leaves=8,
)


async def call(self: Any, first: Any, second: Any = None) -> None: ...


SIGNATURE = inspect.signature(call)


def plain(value: Any) -> Any:
    """Python's own types again."""
    return json.loads(json.dumps(value, default=lambda one: one.tolist() if hasattr(one, "tolist") else dict(one)))


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list) else value


@given(first=PLAIN, second=PLAIN, by_name=st.booleans())
def test_every_form_keeps_the_content(first, second, by_name):
    args, named = ((None, first), {"second": second}) if by_name else ((None, first, second), {})
    for form in places(SIGNATURE, args, named):
        changed = formed(SIGNATURE, args, named, form)
        assert changed is not None, form
        got = SIGNATURE.bind(*changed[0], **changed[1]).arguments
        assert without_none(plain([got["first"], got["second"]])) == without_none([first, second]), form


def test_one_place_gets_the_form():
    batch = {"ids": [[1, 2], [3, 4]], "params": {"seed": 7, "stop": None}}
    listed = places(SIGNATURE, (None, batch), {})
    assert "all arguments: by keyword" in listed
    assert {"first.ids: tuple", "first.ids[]: tuple", "first.params.seed: NumPy int64"} <= set(listed)
    args, named = formed(SIGNATURE, (None, batch), {}, "first.ids[]: tuple") or ((), {})
    assert args[1]["ids"] == [(1, 2), (3, 4)]
    assert type(args[1]["ids"]) is list
    assert not named
    args, _ = formed(SIGNATURE, (None, batch), {}, "first.params.seed: NumPy int64") or ((), {})
    assert isinstance(args[1]["params"]["seed"], np.int64)
    args, _ = formed(SIGNATURE, (None, batch), {}, "first.params.stop: left out") or ((), {})
    assert args[1]["params"] == {"seed": 7}
    assert formed(SIGNATURE, (None, batch), {}, "all arguments: by keyword") == ((None,), {"first": batch})
    assert batch == {"ids": [[1, 2], [3, 4]], "params": {"seed": 7, "stop": None}}


def test_a_form_that_no_argument_has():
    assert formed(SIGNATURE, (None, {"ids": [1]}), {}, "first.other: tuple") is None


def test_what_a_method_takes_by_any_name():
    async def control(self: Any, *args: Any, **kwargs: Any) -> None: ...

    signature = inspect.signature(control)
    assert set(places(signature, (None,), {"tags": ["weights"]})) >= {"all arguments: by position", "tags: tuple"}
    assert formed(signature, (None,), {"tags": ["weights"]}, "all arguments: by position") == ((None, ["weights"]), {})
    assert formed(signature, (None,), {"tags": ["weights"]}, "tags: tuple") == ((None,), {"tags": ("weights",)})


@pytest.mark.parametrize("form", NO_NUMBERS)
def test_a_number_becomes_none_at_one_place(form):
    batch = {"params": {"temperature": 0.0, "top_p": 0.5, "seed": 7}}
    args, _ = formed(SIGNATURE, (None, batch), {}, f"first.params.temperature: {form}") or ((), {})
    assert not math.isfinite(args[1]["params"].pop("temperature"))
    assert args[1]["params"] == {"top_p": 0.5, "seed": 7}
    assert formed(SIGNATURE, (None, batch), {}, f"first.params.seed: {form}") is None
