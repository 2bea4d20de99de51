"""An entry of the ledger explains only its own verdicts, for its own reason, as often as it says, until its expiry date."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract.errors import Blame, LedgerError
from harness.judging.ledger import Ledger, apply, load, uses
from harness.records.verdict import Conformance, Parity, Verdict
from tests import recordings

TODAY = datetime.date(2026, 5, 1)
LEGACY, HTTP = "skyrl-0.2.0:legacy", "skyrl-0.2.0:http"
GOOD = """
[[divergence]]
id = "stop-text"
scenario = "stops.test_*"
check = "stops.text"
targets = ["skyrl-0.2.0:http"]
reason = "row \\\\d+ keeps the stop string"
cap = 2
owner = "SkyRL inference maintainers"
expires = 2026-12-31
source = "skyrl/client.py:12: the stop string is not cut off"
"""


def ledger(tmp_path, *edits: tuple[str, str], more: str = "") -> Ledger:
    text = GOOD
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "ledger.toml"
    file.write_text(text + more)
    return load(file)


def verdict(name: str = "a", **fields) -> Verdict:
    about = {"check": "stops.text", "target": HTTP, "status": "fail", "reason": "row 3 keeps the stop string"}
    return recordings.verdict(**(about | {"scenario": f"stops.test_{name}", "blame": Blame.STACK} | fields))


def compared(name: str = "a", status: str = "regression", **fields) -> Verdict:
    return verdict(name, baseline=LEGACY, status=status, reason="the candidate fails stops.text", **fields)


def known(verdicts) -> list[str | None]:
    return [v.known for v in verdicts]


def test_the_shipped_ledger_loads():
    load()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("cap = 2\n", "", "stop-text.*cap"),
        ("cap = 2", "cap = 0", "stop-text.*cap"),
        ("cap = 2", 'cap = "many"', "stop-text.*cap"),
        ("expires = 2026-12-31\n", "", "stop-text.*expires"),
        ("expires = 2026-12-31", 'expires = "soon"', "stop-text.*expires"),
        ('owner = "SkyRL inference maintainers"', 'owner = ""', "stop-text.*owner"),
        ("cap = 2", "cap = 2\ncolour = 1", "stop-text.*colour"),
        ('"row \\\\d+ keeps the stop string"', '"row ("', "stop-text.*reason.*regular expression"),
        ('"row \\\\d+ keeps the stop string"', '".*"', "stop-text.*reason.*any reason"),
        ("skyrl/client.py:12: the stop string is not cut off", "it is so", "stop-text.*source"),
        ("skyrl/client.py:12: the stop string is not cut off", "client.py:12", "stop-text.*source"),
        ('["skyrl-0.2.0:http"]', "[]", "stop-text.*targets"),
        ('["skyrl-0.2.0:http"]', '["*:http"]', "stop-text.*targets"),
        ('id = "stop-text"', 'id = "Stop Text"', "Stop Text.*id"),
        ("cap = 2", 'cap = 2\nlink = "javascript:alert(1)"', "stop-text.*link"),
        ("cap = 2", 'cap = 2\nstatus = "pass"', "stop-text.*status"),
        ('id = "stop-text"\n', "", "number 1.*id"),
        ("[[divergence]]", "[[divergance]]", "divergance"),
        ("[[divergence]]", "[[divergence", "TOML"),
    ],
)
def test_a_malformed_entry_is_refused_with_its_id_and_field(tmp_path, old, new, says):
    with pytest.raises(LedgerError, match=says) as caught:
        ledger(tmp_path, (old, new))
    assert caught.value.next_step


def test_the_same_entry_twice_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="'id' is given 2 times"):
        ledger(tmp_path, more=GOOD)
    with pytest.raises(LedgerError, match=r"other.*matches what 'stop-text' matches"):
        ledger(tmp_path, more=GOOD.replace("stop-text", "other"))


def test_a_red_verdict_with_the_whole_reason_is_explained(tmp_path):
    verdicts, problems = apply(ledger(tmp_path), [verdict()], TODAY)
    assert known(verdicts) == ["stop-text"]
    assert not verdicts[0].red
    assert problems == []


@pytest.mark.parametrize("other", [{"scenario": "pause.test_a"}, {"check": "stops.reason"}, {"target": LEGACY}])
def test_a_verdict_about_something_else_is_left_alone_and_the_entry_too(tmp_path, other):
    verdicts, problems = apply(ledger(tmp_path), [verdict(**other)], TODAY)
    assert known(verdicts) == [None]
    assert problems == []


def test_another_topology_is_left_alone(tmp_path):
    entries = ledger(tmp_path, ("cap = 2", 'cap = 2\ntopology = "remote"'))
    verdicts, problems = apply(entries, [verdict()], TODAY)
    assert (known(verdicts), problems) == ([None], [])
    verdicts, _ = apply(entries, [verdict(topology="remote")], TODAY)
    assert known(verdicts) == ["stop-text"]


@pytest.mark.parametrize(
    "reason", ["row 3 keeps the stop string and loses a token", "so row 3 keeps the stop string", "row x keeps"]
)
def test_a_changed_reason_is_red_and_shows_both(tmp_path, reason):
    verdicts, problems = apply(ledger(tmp_path), [verdict(reason=reason)], TODAY)
    assert known(verdicts) == [None]
    (problem,) = problems
    assert "reason changed" in problem.problem
    assert reason in problem.problem
    assert r"row \d+ keeps the stop string" in problem.problem


def test_a_pattern_is_stale_only_where_all_that_it_covers_was_driven(tmp_path):
    judged = [verdict(status="pass", reason="")]
    for elsewhere, stale in (((), True), (("pause.test_a",), True), (("pause.test_a", "stops.test_z"), False)):
        _, problems = apply(ledger(tmp_path), judged, TODAY, elsewhere)
        assert ["matches nothing" in p.problem for p in problems] == [True] * stale, elsewhere
    exact = ledger(tmp_path, ("stops.test_*", "stops.test_a"))
    _, problems = apply(exact, judged, TODAY, ["stops.test_z"])
    assert problems, "the scenario that is named was driven, whatever else was not"
    _, problems = apply(exact, judged, TODAY, ["stops.test_a"])
    assert not problems, "it may be about a placement in which it was not driven"


def test_a_filtered_run_does_not_say_that_the_reason_of_a_pattern_changed(tmp_path):
    new = [verdict(reason="something else altogether")]
    for elsewhere, changed in (((), True), (("stops.test_z",), False)):
        verdicts, problems = apply(ledger(tmp_path), new, TODAY, elsewhere)
        assert bool(problems) is changed, elsewhere
        assert known(verdicts) == [None], "it is red for itself"


def test_an_entry_whose_scenario_could_not_be_judged_is_left_alone(tmp_path):
    _, problems = apply(ledger(tmp_path), [verdict(status="untestable", reason="tap is blind")], TODAY)
    assert problems == []


def test_an_expired_entry_explains_nothing_and_is_a_problem(tmp_path):
    entries = ledger(tmp_path)
    last_day, after = datetime.date(2026, 12, 31), datetime.date(2027, 1, 1)
    assert known(apply(entries, [verdict()], last_day)[0]) == ["stop-text"]
    verdicts, problems = apply(entries, [verdict()], after)
    assert known(verdicts) == [None]
    assert ["expired" in p.problem for p in problems] == [True]


def test_the_surplus_over_the_cap_stays_red(tmp_path):
    verdicts, problems = apply(ledger(tmp_path), [verdict(n) for n in "dcba"], TODAY)
    assert known(verdicts) == [None, None, "stop-text", "stop-text"]
    assert "matches 4 verdicts, its cap is 2" in problems[0].problem


def test_a_regression_is_explained_with_its_cause_and_not_counted(tmp_path):
    judged = [verdict(n) for n in "ab"] + [compared(n) for n in "ab"]
    verdicts, problems = apply(ledger(tmp_path), judged, TODAY)
    assert known(verdicts) == ["stop-text"] * 4
    assert problems == []


def test_a_regression_whose_cause_is_not_explained_stays_red(tmp_path):
    verdicts, _ = apply(ledger(tmp_path), [verdict(reason="new"), compared()], TODAY)
    assert known(verdicts) == [None, None]
    other_check, _ = apply(ledger(tmp_path), [verdict(), compared(check="stops.reason")], TODAY)
    assert known(other_check) == ["stop-text", None]


def test_both_wrong_is_explained_only_when_both_sides_are(tmp_path):
    half = [verdict(), verdict(target=LEGACY, reason="other"), compared(status="both-wrong")]
    assert known(apply(ledger(tmp_path), half, TODAY)[0]) == ["stop-text", None, None]
    both = ledger(tmp_path, ('["skyrl-0.2.0:http"]', '["skyrl-0.2.0:http", "skyrl-0.2.0:legacy"]'))
    whole = [verdict(), verdict(target=LEGACY), compared(status="both-wrong")]
    assert known(apply(both, whole, TODAY)[0]) == ["stop-text"] * 3


def test_an_untestable_comparison_follows_the_side_that_could_not_be_judged(tmp_path):
    entries = ledger(tmp_path, ("cap = 2", 'cap = 2\nstatus = "untestable"'))
    side = verdict(status="untestable", blame=Blame.DEPENDENCY)
    assert known(apply(entries, [side, compared(status="untestable")], TODAY)[0]) == ["stop-text"] * 2
    other = verdict(target=LEGACY, status="untestable", reason="tap is blind")
    assert known(apply(entries, [side, other, compared(status="untestable")], TODAY)[0]) == ["stop-text", None, None]


def test_a_baseline_defect_follows_the_baseline(tmp_path):
    entries = ledger(tmp_path, ('["skyrl-0.2.0:http"]', '["skyrl-0.2.0:legacy"]'))
    judged = [verdict(target=LEGACY), compared(status="baseline-defect")]
    assert known(apply(entries, judged, TODAY)[0]) == ["stop-text"] * 2


def test_a_difference_of_outputs_is_matched_by_its_pair(tmp_path):
    entries = ledger(
        tmp_path,
        ('["skyrl-0.2.0:http"]', f'["{LEGACY}~{HTTP}"]'),
        ("row \\\\d+ keeps the stop string", "the candidate fails stops\\\\.text"),
    )
    assert known(apply(entries, [verdict(), compared()], TODAY)[0]) == [None, "stop-text"]


def test_two_entries_for_one_verdict_are_a_problem(tmp_path):
    more = GOOD.replace("stop-text", "wider").replace("stops.test_*", "stops.*")
    verdicts, problems = apply(ledger(tmp_path, more=more), [verdict()], TODAY)
    assert known(verdicts) == ["stop-text"]
    assert any(p.entry == "wider" and "explains what 'stop-text'" in p.problem for p in problems)


LOCAL = "local:http"


def test_an_entry_holds_for_a_stack_that_is_its_release_under_another_name(tmp_path):
    entries = ledger(tmp_path, ("cap = 2", "cap = 1"))
    judged = [verdict(), verdict(target=LOCAL), verdict(target=LOCAL, baseline=LEGACY, status="regression", reason="")]
    assert known(apply(entries, judged, TODAY)[0]) == ["stop-text", None, None]
    assert known(apply(entries.holding_for({LOCAL: None}), judged, TODAY)[0]) == ["stop-text", None, None]
    verdicts, problems = apply(entries.holding_for({LOCAL: HTTP}), judged, TODAY)
    assert (known(verdicts), problems) == (["stop-text"] * 3, []), "each has a cap of its own"
    verdicts, problems = apply(entries.holding_for({LOCAL: HTTP}), [verdict(n, target=LOCAL) for n in "ab"], TODAY)
    assert known(verdicts) == ["stop-text", None]
    assert "matches 2 verdicts, its cap is 1" in problems[0].problem


def test_an_entry_about_a_pair_holds_where_either_side_is_a_release_under_another_name(tmp_path):
    pair = ledger(tmp_path, ('["skyrl-0.2.0:http"]', f'["{LEGACY}~{HTTP}"]'))
    held = pair.holding_for({LOCAL: HTTP, "local:legacy": LEGACY})
    for baseline, target in ((LEGACY, LOCAL), ("local:legacy", LOCAL), ("local:legacy", HTTP), (LEGACY, HTTP)):
        judged = [verdict(target=target, baseline=baseline, status="regression")]
        assert known(apply(held, judged, TODAY)[0]) == ["stop-text"]
    assert known(apply(held, [verdict(target=LEGACY, baseline=LOCAL, status="regression")], TODAY)[0]) == [None]


LATER = "skyrl-0.4.0:http"


def test_an_entry_holds_for_another_release_with_a_place_there_and_is_judged_there_alone(tmp_path):
    entries = ledger(tmp_path, ("cap = 2", f'cap = 1\nalso."{LATER}" = "skyrl/client.py:30"'))
    judged = [verdict(), verdict(target=LATER)]
    assert known(apply(entries, judged, TODAY)[0]) == ["stop-text"] * 2, "each release has a cap of its own"
    mended = [verdict(), verdict(target=LATER, status="pass", reason="")]
    verdicts, [problem] = apply(entries, mended, TODAY)
    assert (known(verdicts), problem.entry) == (["stop-text", None], "stop-text")
    assert f"matches nothing on {LATER}" in problem.problem
    assert [(use.target, use.explained, use.stale) for use in uses(entries, {"run": verdicts})] == [
        (HTTP, 1, False),
        (LATER, 0, True),
    ]


@pytest.mark.parametrize(
    ("stack", "place", "says"),
    [(LATER, "somewhere", "also.*somewhere"), (HTTP, "client.py:30", "targets"), ("*:http", "client.py:30", "targets")],
)
def test_another_release_without_a_place_or_named_twice_is_refused(tmp_path, stack, place, says):
    with pytest.raises(LedgerError, match=f"stop-text.*{says}"):
        ledger(tmp_path, ("cap = 2", f'cap = 2\nalso."{stack}" = "{place}"'))


def test_an_own_stack_that_mended_a_difference_does_not_make_its_entry_stale(tmp_path):
    held = ledger(tmp_path).holding_for({LOCAL: HTTP})
    mended = verdict(target=LOCAL, status="pass", reason="")
    assert apply(held, [mended], TODAY)[1] == []
    assert len(apply(held, [mended, verdict(status="pass", reason="")], TODAY)[1]) == 1, "the release has to have it"


def test_runs_together_show_what_each_entry_explains(tmp_path):
    more = GOOD.replace("stop-text", "gone").replace("stops.text", "stops.gone")
    more += GOOD.replace("stop-text", "idle").replace("stops.text", "stops.idle")
    entries = ledger(tmp_path, more=more)
    monday, _ = apply(entries, [verdict(), compared(), verdict(check="stops.gone", status="pass", reason="")], TODAY)
    tuesday, _ = apply(entries, [verdict("b", status="pass", reason="")], TODAY)
    blind = verdict(check="stops.idle", status="untestable", reason="tap is blind")
    found = uses(entries, {"monday": monday, "tuesday": [*tuesday, blind]})
    assert [(use.entry, use.target, use.judged, use.explained, use.runs) for use in found] == [
        ("stop-text", HTTP, 3, 2, ["monday"]),
        ("gone", HTTP, 1, 0, []),
        ("idle", HTTP, 0, 0, []),
    ]
    assert [use.stale for use in found] == [False, True, False]


def test_a_run_that_was_judged_with_another_ledger_is_refused(tmp_path):
    judged, _ = apply(ledger(tmp_path), [verdict()], TODAY)
    with pytest.raises(LedgerError, match="run monday was judged with entries that the ledger lacks: stop-text"):
        uses(Ledger(), {"monday": judged})


EXPLAINED = {
    "fail": {None, "fail"},
    "untestable": {None, "untestable"},
    "regression": {None, "regression"},
    "both-wrong": {None, "both-wrong"},
    "missing~": {None, "missing"},
    "untestable~": {None, "untestable"},
}
"""Status of a verdict ("~": of a comparison) → statuses of entries that explain it. Other statuses are not red."""
ENTRY_STATUSES = (None, "fail", "regression", "both-wrong", "missing", "untestable")


def every_status() -> list[str]:
    compared_too = [f"{status}~" if status in set(Conformance) else str(status) for status in Parity]
    return [*map(str, Conformance), *compared_too]


def test_the_statuses_that_are_red_are_those_that_can_be_explained():
    for name in every_status():
        pair = {"baseline": LEGACY} if name.endswith("~") or name not in set(Conformance) else {}
        assert verdict(status=name.rstrip("~"), **pair).red == (name in EXPLAINED), name


@pytest.mark.parametrize("of_entry", ENTRY_STATUSES)
@pytest.mark.parametrize("name", every_status())
def test_an_entry_explains_a_verdict_of_its_status_and_no_other(tmp_path, name: str, of_entry: str | None):
    pair = {"baseline": LEGACY} if name.endswith("~") or name not in set(Conformance) else {}
    edits = [] if of_entry is None else [("cap = 2", f'cap = 2\nstatus = "{of_entry}"')]
    (found,), problems = apply(ledger(tmp_path, *edits), [verdict(status=name.rstrip("~"), **pair)], TODAY)
    explained = of_entry in EXPLAINED.get(name, ())
    assert (found.known == "stop-text") == explained
    assert not (explained and problems)
    assert found.red == (name in EXPLAINED and not explained)


STATUSES = st.sampled_from(["pass", "fail", "untestable", "missing"])


@given(st.lists(st.tuples(st.sampled_from("abcdef"), STATUSES, st.sampled_from(["row 1 keeps the stop string", "x"]))))
def test_whatever_was_judged_only_reds_are_explained_and_never_more_than_the_cap(tmp_path_factory, drawn):
    entries = ledger(tmp_path_factory.mktemp("ledger"))
    judged = [verdict(name, status=status, reason=reason) for name, status, reason in {d[0]: d for d in drawn}.values()]
    verdicts, problems = apply(entries, judged, TODAY)
    explained = [v for v in verdicts if v.known]
    assert all(v.status in ("fail", "untestable") and v.reason != "x" for v in explained)
    assert len(explained) <= 2
    assert [msg.id for msg in verdicts] == [v.id for v in judged]
    settled = [v for v in judged if v.status in ("pass", "fail")]
    assert bool(explained) or bool(problems) or not settled


def test_a_known_reason_does_not_hide_another_one(tmp_path):
    both = verdict(
        reason="row 3 keeps the stop string; text is empty", reasons=["row 3 keeps the stop string", "text is empty"]
    )
    entries = ledger(tmp_path)
    told, problems = apply(entries, [both], TODAY)
    assert (known(told), told[0].red, problems) == ([None], True, [])
    assert told[0].explained == {"row 3 keeps the stop string": "stop-text"}
    assert told[0].told == "text is empty (known beside it: stop-text)"

    more = GOOD.replace('"stop-text"', '"no-text"').replace("row \\\\d+ keeps the stop string", "text is empty")
    told, problems = apply(ledger(tmp_path, more=more), [both], TODAY)
    assert (known(told), told[0].red, problems) == (["stop-text"], False, [])


def test_a_race_that_did_not_show_is_not_stale_and_still_explains_what_it_did(tmp_path):
    entries = ledger(tmp_path, ("cap = 2", 'cap = 2\nrace = "two requests race"'))
    assert apply(entries, [verdict(status="pass", reason="")], TODAY)[1] == []
    assert known(apply(entries, [verdict()], TODAY)[0]) == ["stop-text"]
    [use] = uses(entries, {"run": [verdict(status="pass", reason="")]})
    assert (use.judged, use.explained, use.stale) == (1, 0, False)
    with pytest.raises(LedgerError, match="race"):
        ledger(tmp_path, ("cap = 2", 'cap = 2\nrace = ""'))
