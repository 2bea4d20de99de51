"""Every format shows the same verdicts, escapes text from outside, and is red if nothing was judged."""

from __future__ import annotations

import html
import html.parser
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.checks.gaps import gap_of
from harness.contract.checkout import Checkout
from harness.contract.errors import UsageError
from harness.judging.ledger import Ledger
from harness.records.verdict import (
    Cause,
    Change,
    Concession,
    Drive,
    Exposure,
    GapCurve,
    Gate,
    How,
    Judgement,
    Margin,
    NoiseFloor,
    OpenCause,
    Severity,
)
from harness.suite.plan import Plan, load_plan
from reports import json_report, markdown, plan_figures, reproduce, schemas
from reports.readme import block
from reports.render import read_report, write_all
from reports.terminal import show
from reports.text import sides, visible
from reports.view import count, divergences, tally
from tests import recordings, synthetic
from tests.synthetic import HTTP, LEGACY, verdict

FORMATS = ("report.json", "junit.xml", "report.md", "report.html")
GATE = Gate(
    question="May b replace a? (profile removal)",
    profile="removal",
    means="Yes means: a may go",
    may_replace=True,
    reasons=[],
)
HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    "\u202eevil\u2066\u200b",
    "nul\x00esc\x1b[2Jbell\x07",
    "```\n# heading\n@maintainer fixes #12 | a | b |",
    "{{ run.run_id }}{% include 'report.css' %}",
    '"><a href="javascript:alert(1)">',
    "https://evil.example www.evil.example ]]> <!-- -- >",
    "lone \ud800 surrogate",
]


def empty() -> Judgement:
    return Judgement(run=recordings.info(baseline=None, candidate=None), verdicts=[])


def hostile() -> Judgement:
    """A judgement with hostile text in every field that can hold a stack's words."""
    base = synthetic.judgement()
    bad = [
        verdict(
            "sampling",
            f"hostile_{number}",
            "outputs.text",
            HTTP,
            baseline=LEGACY,
            status="regression",
            reason=text,
            promise=text,
            source=text,
            fault=text,
            next_step=text,
            evidence=[
                {text: text, "baseline": text, "candidate": text * 2, "nested": {text: [text]}},
                {"long": text * 2000},
            ],
            exposures=[Exposure(severity=Severity.HIGH, where=text, what=text, by=[text])],
        )
        for number, text in enumerate(HOSTILE)
    ]
    every = "".join(HOSTILE)
    header = {"target": every, "packages": {"vllm": every}, "notes": [every], "hardware": {"cpu": every}, every: every}
    header["patches"] = [{"name": every, "reason": every, "version": every}]
    run = msgspec.structs.replace(
        base.run, outcome=every, run_id=every, created_at=every, command=every, headers=[header]
    )
    gate = msgspec.structs.replace(GATE, may_replace=False, reasons=HOSTILE, aside=HOSTILE, means=" ".join(HOSTILE))
    odd = [OpenCause(pair=text, cause=text, verdicts=1, places=1, scenarios=[text]) for text in HOSTILE]
    bent = [concession(name=text, what=text, hides=text) for text in HOSTILE]
    return msgspec.structs.replace(
        base, run=run, verdicts=[*base.verdicts, *bad], gate=gate, concessions=bent, open_causes=odd
    )


def concession(**changes: Any) -> Concession:
    fields: dict[str, Any] = {
        "id": "one",
        "kind": "check",
        "place": "harness/checks/echo.py",
        "name": "ECHO",
        "stacks": [HTTP],
        "what": "It looks away.",
        "why": "…",
    }
    return Concession(**(fields | changes))


def written(judgement: Judgement, folder) -> dict[str, str]:
    paths = write_all(judgement, folder, plan=synthetic.plan(), ledger=synthetic.ledger())
    assert sorted(paths) == sorted(FORMATS)
    assert sorted(p.name for p in folder.iterdir()) == sorted(FORMATS)
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def in_terminal(judgement: Judgement, width: int = 100) -> str:
    out = io.StringIO()
    show(judgement, Console(file=out, width=width, no_color=True), plan=synthetic.plan())
    return out.getvalue()


class Page(html.parser.HTMLParser):
    """Tags, ids and links of a page, as a browser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "action"):
                self.links.append(value)
            elif name.startswith("on"):
                self.handlers.append(name)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("schema", schemas.ALL, ids=lambda schema: schema.file)
def test_every_published_schema_is_current(schema):
    assert json.loads(schema.path.read_text()) == schema.made(), "run python -m reports.schemas"


def test_report_json_validates_and_comes_back(tmp_path):
    judgement = synthetic.judgement()
    report = json.loads(written(judgement, tmp_path)["report.json"])
    jsonschema.Draft202012Validator(json_report.SCHEMA.made()).validate(report)
    assert read_report(tmp_path / "report.json") == judgement


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{}", "has format None"), (b'{"format": 1}', "has format 1"), (b'{"format": 2', "is not a report"),
     (b'{"format": 2}', "is not a report"), (b"[]", "has format None"), (b"\xff", "is not a report")],
)  # fmt: skip
def test_what_is_not_a_report_is_refused_by_name(tmp_path, content, says):
    file = tmp_path / "report.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=says) as caught:
        read_report(file)
    assert caught.value.next_step
    with pytest.raises(UsageError, match="cannot read"):
        read_report(tmp_path / "none.json")


def test_all_formats_count_the_same(tmp_path):
    judgement = synthetic.judgement()
    counts = count(judgement)
    assert (counts.red, counts.known) == (12, 4)
    files = written(judgement, tmp_path)
    assert json.loads(files["report.json"])["counts"]["red"] == counts.red
    assert json.loads(files["report.json"])["counts"]["known"] == counts.known
    suite = ET.fromstring(files["junit.xml"])
    kinds = [(child.tag, child.get("type")) for case in suite.iter("testcase") for child in case]
    assert sum(kind[0] == "failure" for kind in kinds) == counts.red + counts.ledger_problems
    assert kinds.count(("skipped", "known")) == counts.known
    assert len(suite.findall("testcase")) == counts.verdicts + counts.ledger_problems == int(suite.get("tests"))
    page = Page(files["report.html"])
    tiles = re.findall(r"<b>(\d+)</b><span>(verdicts|red|known|ledger problems)</span>", files["report.html"])
    assert {word: int(n) for n, word in tiles} == {
        "verdicts": counts.verdicts, "red": counts.red, "known": counts.known, "ledger problems": 1
    }  # fmt: skip
    assert f"**{counts.red} red**, {counts.known} known" in files["report.md"]
    assert f"{counts.red} red, {counts.known} known" in in_terminal(judgement)
    for divergence in divergences(judgement):
        for name, text in {**files, "terminal": re.sub(r"\s+", " ", in_terminal(judgement))}.items():
            where = page.text if name == "report.html" else html.unescape(text)
            short = name in ("terminal", "junit.xml", "report.md")
            assert divergence.reason in where or (short and not divergence.red), (name, divergence.reason)


def test_every_verdict_has_one_place_in_the_page_and_every_link_leads_to_one(tmp_path):
    judgement = synthetic.judgement()
    page = Page(written(judgement, tmp_path)["report.html"])
    assert len(set(page.ids)) == len(page.ids)
    assert sum(name.startswith("v-") for name in page.ids) == len(judgement.verdicts)
    inside = {link[1:] for link in page.links if link.startswith("#")}
    assert inside <= set(page.ids)
    outside = [link for link in page.links if not link.startswith("#")]
    assert set(outside) == {"https://github.com/NovaSky-AI/SkyRL/pull/904"}, "no network: only what the ledger names"


def test_what_a_stack_says_is_text_in_the_page(tmp_path):
    page = Page(text := written(hostile(), tmp_path)["report.html"])
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "link", "form"})
    assert page.handlers == []
    assert all(link.startswith(("#", "https://github.com/NovaSky-AI/")) for link in page.links)
    assert "<script>alert(1)</script>" in page.text
    assert "{{ run.run_id }}" in page.text
    assert not set(text) & set("\u202e\u2066\u200b\x00\x1b\x07")
    assert "\\u202eevil" in page.text
    assert "nul␀esc␛[2Jbell␇" in page.text


def test_what_a_stack_says_is_text_in_a_comment(tmp_path):
    text = written(hostile(), tmp_path)["report.md"]
    assert not set(text) & set("\u202e\u2066\u200b\x00\x1b\x07")
    prose = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    assert set(re.findall(r"<[^>]*>", prose)) <= {"<details>", "<summary>", "</summary>", "</details>", "<!-- -->"}
    assert not re.search(r"@\w|#\d|https?://|www\.", html.unescape(prose))
    assert not re.search(r"^# heading", prose, re.MULTILINE)
    assert len(text) < markdown.LIMIT


def test_what_a_stack_says_is_text_in_junit_and_terminal(tmp_path):
    text = written(hostile(), tmp_path)["junit.xml"]
    messages = " ".join(node.get("message", "") for node in ET.fromstring(text).iter())
    assert "<script>alert(1)</script>" in messages
    assert "nul␀esc␛" in messages
    for shown in (text, in_terminal(hostile())):
        assert not set(shown) & set("\u202e\u2066\u200b\x00\x1b\x07")


def test_hostile_reports_come_back(tmp_path):
    report = json.loads(written(hostile(), tmp_path)["report.json"])
    jsonschema.Draft202012Validator(json_report.SCHEMA.made()).validate(report)
    back = read_report(tmp_path / "report.json")
    assert count(back) == count(hostile())
    assert back.verdicts[-9].reason == HOSTILE[0]


def test_nothing_judged_is_red_in_every_format(tmp_path):
    files = written(empty(), tmp_path)
    assert json.loads(files["report.json"])["exit_status"] == 1
    suite = ET.fromstring(files["junit.xml"])
    assert [n.get("message") for n in suite.iter("failure")] == ["nothing was judged"]
    assert suite.get("failures") == "1"
    assert "❌ red" in files["report.md"]
    assert "Nothing was judged" in files["report.md"]
    page = Page(files["report.html"]).text
    assert "red: exit status 1" in page
    assert "Nothing was judged" in page
    assert "Yes" not in page
    assert "nothing was judged: that is red" in in_terminal(empty())
    assert "May one stack replace another? NO" in in_terminal(empty())


def test_an_open_gate_says_so_in_every_format(tmp_path):
    run = msgspec.structs.replace(synthetic.judgement().run, start="ray")
    judgement = Judgement(run=run, verdicts=[verdict("ordering", "one_prompt", "c", HTTP)], gate=GATE)
    files = written(judgement, tmp_path)
    assert "**Yes**." in files["report.md"]
    assert '<div class="big yes">Yes</div>' in files["report.html"]
    assert 'name="may_replace" value="True"' in files["junit.xml"]
    assert "(profile removal) YES" in in_terminal(judgement)


def test_every_format_says_what_was_asked_what_a_yes_means_and_what_does_not_stand(tmp_path):
    gate = msgspec.structs.replace(
        GATE, aside=["fail: it is old"], left_out=["0.1 without x"], needless="a does not offer"
    )
    judgement = msgspec.structs.replace(synthetic.judgement(), gate=gate)
    files = written(judgement, tmp_path)
    shown = [in_terminal(judgement), files["report.md"], Page(files["report.html"]).text]
    for said in (GATE.question, GATE.means, "1 objection does not stand under profile removal", "fail: it is old"):
        assert all(said in one for one in shown), said
    assert all("judged without" in one and "a does not offer" in one for one in shown)
    assert f'name="question" value="{GATE.question}"' in files["junit.xml"]
    assert json.loads(files["report.json"])["judgement"]["gate"]["question"] == GATE.question


def test_every_format_says_that_the_baseline_was_recorded_earlier_and_how_to_use_it_again(tmp_path):
    made = synthetic.judgement()
    judgement = msgspec.structs.replace(made, run=msgspec.structs.replace(made.run, recorded="/runs/monday"))
    files = written(judgement, tmp_path)
    for shown in (in_terminal(judgement), files["report.md"], Page(files["report.html"]).text):
        assert f"{LEGACY} was not started: its recordings are those of run r, 2026-05-02" in shown
        assert "--baseline /runs/monday --candidate skyrl-0.2.0:http" in shown


def test_each_case_in_junit_has_the_time_of_the_drives_that_were_judged(tmp_path):
    at = {"scenario": "ordering.test_one_prompt", "topology": "disaggregated"}
    alone, pair = (verdict("ordering", "one_prompt", "c", HTTP, **fields) for fields in ({}, {"baseline": LEGACY}))
    undriven = verdict("ordering", "messages", "c", HTTP)
    drives = [
        Drive(target=LEGACY, takes=2, seconds=1.5, **at),
        Drive(target=HTTP, takes=1, seconds=0.25, **at),
        Drive(target=HTTP, takes=1, seconds=8.0, **(at | {"topology": "colocated"})),
    ]
    made = msgspec.structs.replace(synthetic.judgement(), verdicts=[alone, pair, undriven], drives=drives)
    suite = ET.fromstring(written(made, tmp_path)["junit.xml"])
    assert [case.get("time") for case in suite.iter("testcase")][:3] == ["0.250", "1.750", "0.000"]
    assert suite.get("time") == "9.750"


def test_a_run_that_ended_early_is_a_failure_in_junit(tmp_path):
    base = synthetic.judgement()
    early = msgspec.structs.replace(base, run=msgspec.structs.replace(base.run, outcome="stopped by Ctrl-C"))
    files = written(early, tmp_path)
    assert "stopped by Ctrl-C" in [n.get("message") for n in ET.fromstring(files["junit.xml"]).iter("failure")]
    assert all("stopped by Ctrl-C" in text for text in [*files.values(), in_terminal(early)])


def test_every_format_shows_each_numeric_check_and_how_steady_the_verdicts_were(tmp_path):
    base = synthetic.judgement()
    floor = NoiseFloor(
        check="sampling.spread", unit="−log10 p", floor=2.5, bound=6.0, weakest_fault=12.75,
        faults={"temperature × 0.70": 12.75, "temperature × 1.43": 37.1}, facts=896, false_alarm_rate=1e-6, power=0.97,
    )  # fmt: skip
    count_only = NoiseFloor(check="pauses", unit="steps", floor=0, bound=0, weakest_fault=37.0, facts=8)
    takes = [(10, 10), (10, 9), (10, 3), (1, 1)]
    verdicts = [verdict("ordering", f"n{n}", "c", HTTP, takes=t, alike=a) for n, (t, a) in enumerate(takes)]
    judgement = msgspec.structs.replace(base, noise=[*base.noise, floor, count_only], verdicts=verdicts)
    counts = count(judgement)
    assert (counts.takes, counts.repeated, counts.unsteady) == (10, 3, 2)
    files = written(judgement, tmp_path)
    told = "10 takes per scenario: 3 verdicts, 2 varied between takes"
    for name in ("report.html", "report.md"):
        assert told in html.unescape(files[name])
        assert "12.8 (temperature × 0.70)" in html.unescape(files[name])
        assert "false alarms 1e-06, power 0.97" in files[name]
    terminal = re.sub(r"\s+", " ", in_terminal(judgement))
    assert told in terminal
    assert "sampling.spread" in terminal
    assert "power 0.97" in terminal
    assert read_report(tmp_path / "report.json").noise[-2:] == [floor, count_only]
    assert json.loads(files["report.json"])["counts"]["unsteady"] == 2
    page = Page(files["report.html"]).text
    assert "3 of 10" in page
    assert "any is red" in page
    assert "of which" not in html.unescape(written(base, tmp_path)["report.md"]), "nothing was driven twice"


def test_every_format_shows_what_is_open_the_worst_first(tmp_path):
    low = Exposure(severity=Severity.LOW, where="router", what="router answers information routes", by=["GET /metrics"])
    high = Exposure(severity=Severity.HIGH, where="router", what="router answers control routes", by=["POST /pause"])
    found = verdict("exposure", "probe", "control_plane_closed", HTTP, exposures=[low, high])
    shown = msgspec.structs.replace(synthetic.judgement(), verdicts=[found])
    contents = written(shown, tmp_path)
    for name in ("report.md", "report.html"):
        page = html.unescape(contents[name])
        assert page.index("router answers control routes") < page.index("router answers information routes"), name
        assert "1 high, 1 low" in page
        assert "GET /metrics" in page
    assert "Open without credentials: 1 high, 1 low" in in_terminal(shown)
    assert "router answers control routes" in in_terminal(shown)
    assert 'id="security"' not in written(synthetic.judgement(), tmp_path)["report.html"]


def test_every_format_says_how_often_the_suite_gives_way_and_the_page_lists_where(tmp_path):
    found = [
        concession(),
        concession(id="two", kind="cpu", stacks=["*"], what="It pretends.", hides="The device's memory."),
    ]
    shown = msgspec.structs.replace(synthetic.judgement(), concessions=found)
    told = "2 concessions to these stacks, 1 of them can hide a difference"
    contents = written(shown, tmp_path)
    assert told in html.unescape(contents["report.md"])
    assert told in in_terminal(shown)
    page = html.unescape(contents["report.html"])
    for text in (
        'id="concessions"',
        "1 of 2 can hide",
        "It looks away.",
        "It pretends.",
        "The device's memory.",
        "every stack",
    ):
        assert text in page
    bare = written(synthetic.judgement(), tmp_path)
    assert 'id="concessions"' not in bare["report.html"]
    assert "concession" not in bare["report.md"]


def test_every_format_names_open_differences_by_cause(tmp_path):
    known = OpenCause(
        pair="a~b", cause="no-text", verdicts=2, places=9, scenarios=["m.one", "m.two"], source="x.py:1: it has none"
    )
    found = [msgspec.structs.replace(known, cause="unexplained", source="", scenarios=list("abcde")), known]
    shown = msgspec.structs.replace(synthetic.judgement(), open_causes=found)
    told = "Open differences, verdicts by cause: unexplained (2), 1 cause with an entry (2)"
    contents = written(shown, tmp_path)
    assert told in html.unescape(contents["report.md"])
    assert told in in_terminal(shown)
    page = html.unescape(contents["report.html"])
    assert page.index("no entry: it counts against the gate") < page.index("x.py:1: it has none")
    assert "a, b, c and 2 more" in page
    assert 'id="open"' not in written(synthetic.judgement(), tmp_path)["report.html"]


def test_every_format_lists_what_a_caller_has_to_change(tmp_path):
    known = Change(name="size", how=How.GONE, baseline="sync size", do="Count the servers", source="x.py:1: no size")
    new = Change(name="sample(payload)", how=How.REQUIRED, candidate="sample(payload): dict")
    fields = {"baseline": LEGACY, "status": "regression", "changes": [known, new], "numbers": {"same": 7.0}}
    found = synthetic.verdict("census", "the_client", "client.census", HTTP, **fields)
    never = {HTTP: ["fly", "sleep(tags)"], LEGACY: []}
    shown = msgspec.structs.replace(synthetic.judgement(), verdicts=[found], never_called=never)
    contents = written(shown, tmp_path)
    told = "Client, what a caller meets: 7 the same, 1 new requirement, 1 gone; 1 without an entry"
    left = f"Offered by {HTTP} and never called: fly, sleep(tags)"
    in_a_line = re.sub(r"\s+", " ", in_terminal(shown))
    assert told in in_a_line
    assert left in in_a_line
    assert f"Offered by {LEGACY}" not in in_a_line
    for name in ("report.md", "report.html"):
        page = html.unescape(contents[name])
        for said in (told, left, "Count the servers", "sample(payload): dict", "no entry says it: this is red"):
            assert said in page, (name, said)
    assert "x.py:1: no size" in contents["report.html"]
    assert read_report(tmp_path / "report.json").verdicts[0].changes == [known, new]
    assert 'id="client"' not in written(synthetic.judgement(), tmp_path)["report.html"]


def test_every_format_shows_the_gap_between_trainer_and_rollouts_by_step(tmp_path):
    steps = [gap_of([[-1.0, -2.0]], [[-1.0, -2.0 - off]], step=step) for step, off in enumerate((0.0125, 0.25))]
    curves = [
        GapCurve(scenario="module.test_trains", topology="colocated", target=target, bound=bound, steps=steps)
        for target, bound in ((LEGACY, 0.96), (HTTP, None))
    ]
    shown = msgspec.structs.replace(synthetic.judgement(), gaps=curves)
    files = written(shown, tmp_path)
    for name in ("report.md", "report.html"):
        page = html.unescape(files[name])
        assert "bound of a token: 0.96 nats" in page, name
        for figure in ("0.00625", "0.0125", "0.25", "50 %"):
            assert figure in page, (name, figure)
    assert f"module@colocated, {HTTP}: mean 0.125, p99 0.25, KL " in re.sub(r"\s+", " ", in_terminal(shown))
    assert read_report(tmp_path / "report.json").gaps == curves
    assert 'id="training"' not in written(synthetic.judgement(), tmp_path)["report.html"]


def test_numbers_that_json_cannot_hold_are_kept_as_words(tmp_path):
    odd = verdict(
        "ordering", "x", "logprobs.finite", HTTP, status="fail", reason="nan", numbers={"worst": math.nan, "n": 3.0}
    )
    noise = [NoiseFloor(check="f", unit="nats", floor=math.inf, bound=math.inf, weakest_fault=1.0)]
    wide = Margin(unit="nats", measured=math.inf, bound=1.0, faults={"a": math.nan})
    odd = msgspec.structs.replace(odd, margin=wide)
    judgement = msgspec.structs.replace(synthetic.judgement(), verdicts=[odd], noise=noise)
    files = written(judgement, tmp_path)
    back = read_report(tmp_path / "report.json").verdicts[0]
    assert back.numbers == {"n": 3.0}
    assert back.margin.measured > 1e308
    assert back.evidence == [{"not finite": {"worst": "nan"}}]
    assert "not finite" in files["report.html"]
    assert "blind to it" in files["report.html"]


def test_a_large_run_still_fits_in_a_comment(tmp_path):
    many = [
        verdict(
            "ordering",
            f"n{n}",
            f"check.{n}",
            HTTP,
            status="fail",
            reason=f"reason {n} " * 40,
            evidence=[{"a": "`" * 500}],
        )
        for n in range(300)
    ]
    judgement = msgspec.structs.replace(synthetic.judgement(), verdicts=many)
    text = written(judgement, tmp_path)["report.md"]
    assert len(text) < markdown.LIMIT
    assert re.search(r"and \d+ more in report\.html", text)


def test_the_terminal_fits_a_hundred_columns_without_colour():
    lines = in_terminal(synthetic.judgement(), width=200).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("✗ regression outputs.tokens" in line for line in lines)


def test_the_smallest_input_is_shown_first():
    first = next(d for d in divergences(synthetic.judgement()) if d.check == "outputs.tokens")
    assert [i.scenario for i in first.instances] == ["weights.test_chunked", "weights.test_many_in_a_row"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"baseline": LEGACY, "topology": "colocated"},
            f"parity run --wave 1 -k test_stop --topology colocated --baseline {LEGACY} --candidate {HTTP}"
            " --start ray --engine cpu",
        ),
        (
            {"topology": "disaggregated"},
            f"parity run --wave 1 -k test_stop --topology disaggregated --engines 2 --stack {HTTP}",
        ),
        ({"topology": "all"}, f"parity run --wave 1 -k test_stop --stack {HTTP}"),
    ],
)
def test_the_command_drives_that_scenario_again(fields, says):
    made = reproduce.command(verdict("sampling", "stop", "c", HTTP, **fields), synthetic.judgement().run)
    assert made.startswith(says)


def test_what_this_start_cannot_show_is_told_apart_from_what_a_stack_lacks():
    lacks = verdict("ipc", "stop", "c", HTTP, status="missing", reason="does not declare sleep")
    here = verdict(
        "ipc", "stop", "d", HTTP, status="missing", reason="is untestable here: needs cuda_ipc", cause=Cause.NOT_HERE
    )
    assert tally([lacks, here, here]) == "2 untestable here: needs cuda_ipc, 1 missing"


def test_the_first_difference_is_marked():
    left, right, note = sides([1, 2, 3], [1, 5, 3, 4])
    assert (left.before, left.mark, left.after) == ("[1, ", "2", ", 3]")
    assert (right.before, right.mark, right.after) == ("[1, ", "5", ", 3, 4]")
    assert note == "first difference at element 1; lengths 3 and 4"
    assert sides([1], [1])[2] == "equal"
    assert sides("ab", "abc")[2] == "first difference at character 2; lengths 2 and 3"


@given(st.text())
def test_visible_text_has_no_hidden_character_and_loses_nothing_that_was_seen(text):
    shown = visible(text)
    assert visible(shown) == shown
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u200b]", shown)


def test_a_report_needs_no_plan_or_ledger_of_its_own(tmp_path):
    assert set(write_all(synthetic.judgement(), tmp_path)) == set(FORMATS)
    written_without = write_all(synthetic.judgement(), tmp_path / "b", plan=Plan(task=[]), ledger=Ledger())
    assert "not in the ledger at hand" in written_without["report.html"].read_text()


# --- the plan in the README -----------------------------------------------------------------------------------------

PLAN_BLOCK = "a\n<!-- plan -->\n<!-- /plan -->\nb\n"


def of_waves(*waves: int, created_at: str = "2026-11-22T10:00:00+00:00", **changes: Any) -> Judgement:
    """The synthetic run as a run of whole waves."""
    base = synthetic.judgement()
    run = msgspec.structs.replace(base.run, whole_waves=list(waves), created_at=created_at, **changes)
    return msgspec.structs.replace(base, run=run)


def test_the_plan_in_the_readme_has_a_row_a_task_and_keeps_those_that_a_run_did_not_drive():
    plan = synthetic.plan()
    waves = sorted({task.wave for task in plan.task})
    once = plan_figures.renewed(PLAN_BLOCK, of_waves(waves[0]), plan)
    rows = block(once, plan_figures.NAME)
    assert rows[0] == f"| task of the plan | {LEGACY} | {HTTP} | {LEGACY} → {HTTP} | driven |"
    assert [row.split()[1] for row in rows[2:]] == [str(task.number) for task in plan.task]
    driven = [row for row in rows if row.endswith("| ray, cpu, 2026-11-22 |")]
    assert driven
    assert all(row.endswith(f"| {plan_figures.UNDRIVEN} |") for row in rows[2:] if row not in driven)
    later = of_waves(99, created_at="2026-12-01T10:00:00+00:00")
    assert plan_figures.renewed(once, later, plan) == once, "its waves are none of the plan's"
    again = of_waves(*waves, created_at="2026-12-01T10:00:00+00:00")
    assert "2026-11-22" not in plan_figures.renewed(once, again, plan)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"whole_waves": []}, "whole waves only"),
        ({"outcome": "interrupted"}, "whole waves only"),
        ({"baseline": None}, "whole waves only"),
        ({"candidate": "local:http"}, "which this run is not about"),
    ],
)
def test_a_run_that_the_readme_cannot_show_is_refused(changes: dict[str, Any], said: str):
    text = plan_figures.renewed(PLAN_BLOCK, of_waves(1), synthetic.plan())
    judgement = of_waves(1)
    other = msgspec.structs.replace(judgement, run=msgspec.structs.replace(judgement.run, **changes))
    with pytest.raises(UsageError, match=said):
        plan_figures.renewed(text, other, synthetic.plan())


def test_the_readme_has_a_row_for_every_task_of_the_plan():
    rows = block((Path(__file__).parents[1] / "README.md").read_text(), plan_figures.NAME)
    tasks = [f"{task.number} {task.title}" for task in load_plan().task]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == tasks, "parity report RUN --readme"


def test_the_commit_of_a_checkout_stands_in_every_report_and_in_the_command_that_repeats_a_verdict(tmp_path: Path):
    tree = Checkout(
        path="/home/me/SkyRL",
        commit="706c3081b" + "0" * 31,
        branch="main",
        changes="1f9a0c2e",
        versions={"skyrl": "0.3.0"},
    )
    made = synthetic.judgement()
    made = msgspec.structs.replace(made, run=msgspec.structs.replace(made.run, checkouts={HTTP: tree}))
    write_all(made, tmp_path)
    console = Console(file=io.StringIO(), width=200)
    show(made, console)
    texts = [console.file.getvalue(), *((tmp_path / f"report.{kind}").read_text() for kind in ("html", "md"))]
    for text in texts:
        assert "skyrl 0.3.0, commit 706c3081b (main), uncommitted changes 1f9a0c2e" in " ".join(text.split())
    assert read_report(tmp_path / "report.json").run.checkouts == {HTTP: tree}
    (red,) = [v for v in made.verdicts if v.red and v.target == HTTP][:1]
    assert f"--checkout {HTTP}=/home/me/SkyRL" in reproduce.command(red, made.run)
