"""Timelines show what was recorded: lanes from recordings made by hand, and pictures with their labels."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import msgspec
import pytest

from harness.checks.base import Evidence
from harness.checks.gaps import gap_of
from harness.contract.messages import PauseRequest, SyncWeightsRequest
from harness.records.recording import Mark, ScenarioTrace
from harness.records.verdict import GapCurve
from reports import drawing, pictures
from reports import timeline as lanes
from reports.render import write_all
from reports.timeline import Bar, Execution, Held, Server, Timeline, Training, Version
from tests import recordings, synthetic, traces

SECOND = 1_000_000_000
BEGAN = 50 * SECOND
"""End of the clean room in the recordings made here."""
SVG = "{http://www.w3.org/2000/svg}"


def at(seconds: float) -> int:
    return BEGAN + round(seconds * SECOND)


def called(method, start, end, request=None, result=None, **about):
    return traces.call(method, request, result, started_ns=at(start), ended_ns=at(end), **about)


def recorded(*calls, observations=(), marks=(), **header) -> Evidence:
    """A scenario after its clean room, whose canary the taps saw."""
    canary = traces.generate([[3]], [[4]], phase="clean_room", label="canary", started_ns=at(-1), ended_ns=at(0))
    seen = [*traces.executed([3], [4], from_ns=at(-0.5)), *observations]
    made = traces.trace(canary, *calls, observations=seen, **header)
    fields = {name: getattr(made, name) for name in ScenarioTrace.__struct_fields__} | {"marks": tuple(marks)}
    return Evidence(ScenarioTrace(**fields), traces.FakeReference())


def ran(start: float, tokens: int, *, server: str = "server-0", reason: str | None = "length", step: float = 0.1):
    return traces.executed(
        [5], [6] * tokens, server=server, reason=reason, from_ns=at(start), step_ns=round(step * SECOND)
    )


def in_flight_sync() -> Evidence:
    """Two requests, paused and resumed around a sync."""
    prompts = [[5], [5]]
    return recorded(
        traces.generate(prompts, [[6] * 8] * 2, label="paused", started_ns=at(0.5), ended_ns=at(3.0)),
        called("pause", 1.0, 1.1, PauseRequest(mode="keep")),
        called("sync_weights", 1.2, 1.4, SyncWeightsRequest(version=3)),
        called("digests", 1.4, 1.5),
        called("resume", 1.6, 1.7),
        observations=[*ran(0.6, 4), *ran(0.6, 4, server="server-1", reason="abort")],
        scenario="weight_sync.test_in_flight",
    )


def test_calls_controls_pauses_and_versions_are_laid_out_in_seconds_from_the_clean_room():
    line = lanes.timeline(in_flight_sync())
    assert line.calls == (Bar(start=0.5, end=3.0, label="paused × 2"),)
    assert [(b.label, b.kind, b.version) for b in line.controls] == [
        ("pause keep", "pause", None), ("sync", "weights", 3), ("resume", "pause", None)
    ], "digests are the harness's own"  # fmt: skip
    assert line.pauses == (Held(start=1.1, end=1.6, mode="keep"),)
    assert line.versions == (Version(start=0.0, end=1.4, version=0), Version(start=1.4, end=3.0, version=3))
    assert [line.version_at(t) for t in (0.0, 1.3, 1.4, 9.0)] == [0, 0, 3, 3]
    assert line.seconds == 3.0


def test_executions_lie_on_their_servers_and_the_canary_is_left_out():
    line = lanes.timeline(in_flight_sync())
    assert [s.name for s in line.servers] == ["server-0", "server-1"]
    whole, cut = (s.executions[0] for s in line.servers)
    assert whole == Execution(start=0.6, end=1.1, steps=(0.7, 0.8, 0.9, 1.0))
    assert (whole.aborted, cut.aborted) == (False, True)
    assert sum(len(s.executions) for s in line.servers) == 2


def test_a_request_that_never_ended_runs_to_the_end_and_an_idle_server_has_its_lane():
    evidence = recorded(
        traces.generate([[5]], None, error=traces.error(), started_ns=at(0.5), ended_ns=at(4.0)),
        observations=ran(0.6, 2, reason=None),
    )
    line = lanes.timeline(evidence)
    assert [(e.start, e.end) for e in line.servers[0].executions] == [(0.6, 4.0)]
    assert line.servers[1] == Server(name="server-1", executions=())
    assert line.calls[0].failed
    assert line.calls[0].label == "generate: ValueError"


def test_a_request_that_its_frontend_dropped_ended_then_though_the_engine_said_nothing():
    dropped = traces.observation("abort", at_ns=at(0.9), request_ids=["r"])
    running = traces.executed([5], [6], request_id="r", reason=None, from_ns=at(0.6))
    call = traces.generate([[5]], [[6]], started_ns=at(0.5), ended_ns=at(4.0))
    (ran,) = lanes.timeline(recorded(call, observations=[*running, dropped])).servers[0].executions
    assert (ran.end, ran.aborted) == (0.9, True)


def test_what_there_is_nothing_of_has_no_lane():
    line = lanes.timeline(recorded(called("world_size", 0.1, 0.2)))
    assert (line.calls, line.servers, line.versions, line.pauses, line.marks) == ((), (), (), (), ())
    assert [b.kind for b in line.controls] == ["other"]


def test_failed_syncs_bring_no_version():
    line = lanes.timeline(recorded(called("sync_weights", 1, 2, SyncWeightsRequest(version=1), error=traces.error())))
    assert line.versions == ()
    assert line.version_at(3) is None
    assert line.controls[0].failed


@pytest.mark.parametrize(
    ("spans", "rows"),
    [([], []), ([(0, 1), (1, 2)], [0, 0]), ([(0, 2), (1, 3), (2, 4)], [0, 1, 0]), ([(0, 0), (0, 0)], [0, 0])],
)
def test_rows_are_shared_by_what_does_not_overlap(spans, rows):
    assert lanes.packed(spans) == rows


def test_density_counts_what_is_in_flight():
    executions = [Execution(start=0, end=2), Execution(start=1, end=3), Execution(start=2, end=3)]
    assert lanes.in_flight(executions) == [(0, 1), (1, 2), (2, 2), (3, 0)]


def test_versions_of_a_trainer_are_numbered_in_order():
    versions = [0, 2**40 + 7, 2**33]
    assert [lanes.version_name(v, versions) for v in versions] == ["version 0", "trained 1", "trained 2"]


def test_sessions_are_counted_by_server():
    prompts, sessions = [[5], [7], [8]], ["a", "a", 7]
    seen = [
        *traces.executed([5], [6], server="server-0", from_ns=at(0.6)),
        *traces.executed([7], [6], server="server-1", from_ns=at(0.6)),
        *traces.executed([8], [6], server="server-1", from_ns=at(0.6)),
    ]
    call = traces.generate(prompts, [[6]] * 3, session_ids=sessions, started_ns=at(0.5), ended_ns=at(2))
    found = lanes.sessions(recorded(call, observations=seen))
    assert found.servers == ["server-0", "server-1"]
    assert found.counts == {'"a"': [1, 1], "7": [0, 1]}
    heat = pictures.heat_map([("one", found), ("two", found)])
    assert [row for row, _ in heat.rows] == ['"a"', "7"]
    assert heat.rows[1][1] == [(0, 0.0), (1, 1.0)] * 2
    assert heat.totals == [1, 2] * 2
    assert lanes.sessions(recorded(traces.generate([[5]], [[6]]))) is None, "no session was given"


GAPS = GapCurve(
    scenario="s", topology="t", target="miniature", bound=1e-3, steps=[gap_of([[-1.0, -2.0]], [[-1.0, -2.1]], step=1)]
)


def noted() -> Evidence:
    marks = [
        Mark(name="evaluation", step=1, at_ns=at(2), numbers={"reward": 0.5}),
        Mark(name="evaluation", step=0, at_ns=at(1), numbers={"reward": 0.25}),
        Mark(name="generation_ack", step=1, at_ns=at(1.5)),
        Mark(name="evaluation", step=9, at_ns=at(-2), numbers={"reward": 9.0}),
    ]
    return recorded(called("train", 1.5, 1.9, {}, {"version": 2**40}), marks=marks)


def test_marks_make_curves_and_those_of_an_attempt_given_up_do_not_count():
    line = lanes.timeline(noted())
    assert [(m.at, m.name) for m in line.marks] == [
        (1, "evaluation"), (1.5, "generation_ack"), (2, "evaluation")
    ]  # fmt: skip
    assert (line.controls[0].kind, line.controls[0].version) == ("training", 2**40)
    assert lanes.training(line, GAPS) == Training(target="miniature", reward=((0, 0.25), (1, 0.5)), gap=GAPS)
    assert lanes.training(lanes.timeline(in_flight_sync()), None) is None


# --- drawing


def texts(svg: str) -> str:
    """All text of a picture that is well-formed XML."""
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return "\n".join("".join(node.itertext()) for node in root.iter(f"{SVG}text"))


def test_a_timeline_holds_its_labels_and_only_the_lanes_that_there_are():
    line = lanes.timeline(in_flight_sync())
    shown = texts(drawing.timelines([line], "p"))
    for label in (
        "miniature", "weight_sync.test_in_flight @ disaggregated", "paused × 2", "pause keep", "sync → 3", "resume",
        "server-0", "server-1", "version 0", "version 3", "s since the scenario began", "ended by an abort",
    ):  # fmt: skip
        assert label in shown, label
    assert "marks" not in shown
    assert "failed" not in shown


def test_both_stacks_stand_below_one_another_and_ids_are_their_own():
    line = lanes.timeline(in_flight_sync())
    both = [line, Timeline(scenario=line.scenario, topology=line.topology, target="skyrl:http", calls=line.calls)]
    one, other = drawing.timelines(both, "one"), drawing.timelines(both, "other")
    assert "miniature" in texts(one)
    assert "skyrl:http" in texts(one)
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert {name.partition("-")[0] for name in ids[0]} == {"one"}
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', one))
    assert used <= ids[0]


def test_the_same_recording_makes_the_same_picture():
    line = lanes.timeline(in_flight_sync())
    assert drawing.timelines([line], "p") == drawing.timelines([line], "p")
    assert "<style" not in drawing.timelines([line], "p"), "a style would hold for the whole page"


def test_many_requests_are_shown_as_a_density_and_many_calls_are_counted():
    many = tuple(Execution(start=n / 1000, end=1.0, steps=(0.5, 0.9)) for n in range(200))
    calls = tuple(Bar(start=n / 1000, end=1.0, label=f"caller {n}") for n in range(200))
    line = Timeline(
        scenario="s", topology="t", target="x", calls=calls, servers=(Server(name="server-0", executions=many),)
    )
    svg = drawing.timelines([line], "p")
    shown = texts(svg)
    assert "200 in flight at most" in shown
    assert f"({200 - drawing.CALL_ROWS} not shown)" in shown
    assert len(svg) < 30_000


def test_what_a_stack_says_is_text_in_a_picture():
    bad = "<script>$x^$ & \x00\u202e</text>日"
    line = Timeline(
        scenario=bad, topology="t", target=bad, controls=(Bar(start=0, end=1, label=bad, kind="other", failed=True),),
        servers=(Server(name=bad, executions=(Execution(start=0, end=1),)),), marks=(lanes.Mark(at=0.1, name=bad),),
    )  # fmt: skip
    svg = drawing.timelines([line], "p")
    assert "<script>$x^$ & ␀\\u202e" in texts(svg)
    assert "<script" not in svg
    assert texts(drawing.curves([Training(target=bad, reward=((0, 1.0),))], "c"))


def test_nothing_at_all_is_a_picture_too():
    assert "nothing was asked" in texts(drawing.timelines([Timeline(scenario="s", topology="t", target="x")], "p"))


def test_curves_name_both_stacks_and_their_gaps():
    line = lanes.timeline(noted())
    run = lanes.training(line, GAPS)
    other = Training(target="skyrl:http", reward=((0, 0.1), (1, 0.2)), gap=msgspec.structs.replace(GAPS, bound=None))
    shown = texts(drawing.curves([run, other], "c"))
    for label in (
        "Evaluation reward",
        "training step",
        "miniature, p99",
        "skyrl:http, mean",
        "bound of a token: 0.001",
    ):
        assert label in shown, label


# --- in the report


def test_a_report_shows_pictures_of_what_changes_or_is_red_and_says_how_many_it_left_out(tmp_path):
    red = synthetic.verdict("red", "it", "c", recordings.info().candidate, status="fail", topology="disaggregated")
    judgement = synthetic.judgement()
    folder = recordings.run_folder(tmp_path / "run", [red.scenario, "module.test_sessions", "module.test_plain"])
    run = recordings.info()
    judgement = type(judgement)(run=run, verdicts=[red])
    found = pictures.gather(judgement, folder.path)
    assert {p.scenario: p.why for p in found.shown}[red.scenario][0] == "red"
    page = write_all(judgement, folder.path)["report.html"].read_text()
    assert page.count("<svg") == len(found.shown)
    where = found.find(red.scenario, "disaggregated")
    assert f'id="{where}"' in page
    assert f'href="#{where}"' in page, "the card of the difference leads there"
    assert "Requests of each session" in page


def test_a_scenario_without_anything_to_see_is_left_out_unless_all_are_wanted(tmp_path, monkeypatch):
    folder = recordings.run_folder(tmp_path / "run", ["module.test_it"])
    judgement = type(synthetic.judgement())(run=recordings.info(), verdicts=[])
    monkeypatch.setattr(pictures, "sessions", lambda _: None)
    found = pictures.gather(judgement, folder.path)
    assert (found.shown, found.left_out) == ([], 1)
    found = pictures.gather(judgement, folder.path, everything=True)
    assert [p.why for p in found.shown] == [[]]
    assert "stack:old" in found.shown[0].timeline
    assert "stack:new" in found.shown[0].timeline


def test_a_recording_that_is_cut_off_says_why_there_are_no_pictures(tmp_path):
    folder = recordings.run_folder(tmp_path / "run", ["module.test_it"])
    path = folder.recorded()[0]
    path.write_bytes(path.read_bytes()[:-20])
    judgement = type(synthetic.judgement())(run=recordings.info(), verdicts=[])
    assert "cut off" in pictures.gather(judgement, folder.path).problem
    assert "There are none:" in write_all(judgement, folder.path)["report.html"].read_text()
