"""The pytest plugin: scenarios become items, one per stack and topology, and one per comparison.

``…[skyrl-0.2.0:legacy@disaggregated]`` drives, records and judges; ``…[skyrl-0.2.0:legacy~skyrl-0.2.0:http@…]``
compares the two recordings and drives nothing. The order of items starts each stack once per topology.
"""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from _pytest.mark.expression import Expression  # pytest offers no other way to read a -k

from fixtures.prompts import Prompts
from harness import PROJECT
from harness.commands import cli
from harness.contract import topology as topology_table
from harness.contract.errors import HarnessError, UsageError
from harness.contract.topology import DEFAULT_ENGINES, Topology
from harness.driving import models
from harness.judging import ledger
from harness.judging.ledger import Ledger
from harness.machine import environments, kept, outlook
from harness.machine.logs import LogStream
from harness.machine.outlook import Start
from harness.machine.progress import Say, console_progress
from harness.machine.targets import Target, default_pair, needs_of, of_local, registry, resolve, wider
from harness.records.differing import around_the_difference
from harness.records.run_folder import RunFolder, find_run
from harness.records.verdict import Judgement, Verdict
from harness.running.earlier import target_of, told_apart
from harness.running.run import judge_run
from harness.running.session import Options, Seat, Session
from harness.suite import profiles
from harness.suite.scenario import MARKS, Scenario, declaration

WAVES = range(1, 7)
TESTS = "tests"
"""The folder of the harness's own tests."""
MOST_WORKERS = 8
"""Each worker imports all tests before its first one: more workers would cost more than they save."""

MOST_BUDGET = 100
"""A larger budget would outlast every deadline."""

BASELINE = pytest.StashKey[tuple[str, Path | None]]()
"""The baseline's name, and the earlier run that recorded it; None if this run drives it."""


OF_THE_SAME_NAME = (
    "candidate", "start", "engines", "model", "run_dir", "reference_python", "dtype", "cuda_graphs", "batch_invariant",
    "budget", "seed", "repeat", "base_port", "ledger", "profile",
)  # fmt: skip
"""Fields of `Options` that an option of this name gives as they are."""


class Duel(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of two targets in one topology."""

    baseline: str
    candidate: str
    topology: Topology

    @property
    def name(self) -> str:
        return f"{self.baseline}~{self.candidate}@{self.topology.name}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `parity run`, which hands them on. `--python` is `--target-python` here."""
    group = parser.getgroup("parity", "rollout parity: which stacks, where, how")
    baseline, candidate = default_pair()
    defaults: dict[str, Any] = {"baseline": baseline, "candidate": candidate, "engine": "auto", "start": "ray"}
    defaults |= {"engines": DEFAULT_ENGINES, "repeat": 1, "budget": 1.0, "seed": 0}
    for name, hint in get_type_hints(cli.run, include_extras=True).items():
        if name in cli.TO_PYTEST_ITSELF or name == "return":
            continue
        declared, option = get_args(hint)
        kind = next((one for one in get_args(declared) if one is not NoneType), declared)
        given: dict[str, Any] = {"help": option.help}
        if kind is bool:
            given |= {"action": "store_true"}
        elif get_origin(kind) is list:
            given |= {"action": "append", "default": [], "metavar": option.metavar}
        else:
            choices = get_args(kind) if get_origin(kind) is Literal else None
            given |= {"default": defaults.get(name), "metavar": option.metavar, "choices": choices}
            given |= {"type": kind} if kind in (int, float, Path) else {}
        if name == "topology":
            given["choices"] = topology_table.names()
        group.addoption(cli.option_of(name), **given)


@pytest.hookimpl(tryfirst=True)  # xdist reads its options in the same hook
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone runs all of the harness's tests, on all cores unless xdist's options or a debugger say otherwise.

    With a wave, it drives scenarios. Some of the tests (a file, a case) run in this process.
    """
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and "wave" in config.getoption("markexpr"):
        config.args[:] = ["scenarios"]
    undecided = config.getoption("numprocesses", 0) is None and not hasattr(config, "workerinput")
    if undecided and _paths(config) == [_tests(config)] and not config.getoption("usepdb"):
        config.option.numprocesses = "logical"
        config.option.maxprocesses = config.option.maxprocesses or MOST_WORKERS


def _paths(config: pytest.Config) -> list[Path]:
    return [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]


def _tests(config: pytest.Config) -> Path:
    return (config.rootpath / TESTS).resolve()


def pytest_configure(config: pytest.Config) -> None:
    only_tests = all(path.is_relative_to(_tests(config)) for path in _paths(config))
    if config.getoption("dist", "no") != "no" and not only_tests:
        raise pytest.UsageError("scenarios are driven one after the other: leave out -n, --dist and --tx")
    config.stash[BASELINE] = _baseline(config)
    for wave in WAVES:
        config.addinivalue_line("markers", f"wave{wave}: scenarios of wave {wave} of the rollout plan (SkyRL #1014)")
    config.addinivalue_line(
        "markers", "bulk: scenarios that send hundreds of requests or start other stacks (--everything)"
    )
    config.addinivalue_line(
        "markers", "spoils: scenarios that spoil their stack, so that it starts anew (--everything)"
    )
    config.pluginmanager.register(Parity(config), "parity-session")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: what collecting makes, modules and items, stays until the end.

    Looking through all of it again and again would take a third of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    scenario = declaration(getattr(item, "obj", None))
    if scenario is not None:
        item.add_marker(f"wave{scenario.wave}")
        for mark in scenario.marks:
            item.add_marker(mark)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    scenario = declaration(metafunc.function)
    if scenario is None:
        return
    options = metafunc.config
    pair = [options.getoption("--candidate"), options.stash[BASELINE][0]]  # the candidate first: see `Session.drive`
    targets = options.getoption("--stack") or pair
    topologies = scenario.driven_in(
        options.getoption("--engines"), options.getoption("--topology"), colocate=options.getoption("--colocate")
    )
    places: list[Seat | Duel] = [Seat(target=name, topology=t) for t in topologies for name in targets]
    if not options.getoption("--stack"):
        places += [Duel(baseline=pair[1], candidate=pair[0], topology=t) for t in topologies]
    metafunc.parametrize("stack", places, indirect=True, ids=[place.name for place in places])


def _baseline(config: pytest.Config) -> tuple[str, Path | None]:
    """The baseline's name and its earlier run, if `--baseline` names one. A target goes before a folder of its name."""
    said = config.getoption("--baseline")
    run = None if said in registry() or config.getoption("--stack") else find_run(said, PROJECT)
    try:
        if run is None and "/" in said:
            raise UsageError(f"there is no run {said!r}", next_step="name a run's folder, or one of `parity targets`")
        if run is None:
            return said, None
        folder = RunFolder.existing(run)
        return told_apart(target_of(folder, "baseline"), folder.run_id, config.getoption("--candidate")), run
    except HarnessError as e:
        raise pytest.UsageError(str(e)) from e


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Seat | Duel:
    """The seat or duel of this item. The scenario itself gets the live `Stack`."""
    place: Seat | Duel = request.param
    return place


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """Deterministic prompts of this scenario: the same on every stack, shared with no other scenario."""
    scenario = declaration(request.function)
    name = scenario.name if scenario else request.function.__name__
    return Prompts(name, seed=request.config.getoption("--seed"))


class Parity:
    """One pytest session's run. Makes and starts nothing before the first scenario runs."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._session: Session | None = None
        self._judgement: Judgement | None = None
        self._report: Path | None = None
        self._broken: HarnessError | None = None
        self._known = Ledger()
        self._targets: dict[str, Target] = {}
        self._selected: dict[Topology, list[str]] = {}
        self._left_out: dict[str, set[str]] = {}
        self._starts: list[Start] = []
        self._logs: LogStream | None = None

    # --- before anything runs

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order items by stack and topology, comparisons last. Refuse options that cannot work before anything starts.

        Scenarios that spoil a stack come last on it, since the next one waits for a fresh start.
        """
        scenarios = {item: found for item in items if (found := declaration(getattr(item, "obj", None))) is not None}
        elsewhere = {item for item in scenarios if _place(item) is None}  # those without a requested topology
        costly: set[pytest.Item] = set()
        if not self._chooses():
            for item in scenarios.keys() - elsewhere:
                if not self._marked(item) and (why := self._costly(scenarios[item], _place(item))):
                    costly.add(item)
                    self._left_out.setdefault(why, set()).add(scenarios[item].name)
        if dropped := costly | elsewhere:
            self._config.hook.pytest_deselected(items=list(dropped))
            items[:] = [item for item in items if item not in dropped]
        mine = [item for item in items if _place(item) is not None]
        if not mine:
            return
        order = _in_order([_place(item) for item in mine])

        def at(item: pytest.Item) -> tuple[int, bool]:
            place, scenario = _place(item), scenarios.get(item)
            return -1 if place is None else order.index(place), scenario is not None and scenario.once

        items.sort(key=at)
        try:
            self._validate()
        except HarnessError as e:
            raise pytest.UsageError(str(e)) from e
        self._selected = _selected(mine)
        self._starts = self._outlook(mine)

    def _chooses(self) -> bool:
        """True if the command line chooses scenarios by name, or all. A -k that only leaves out chooses none."""
        named = any("::" in argument or argument.endswith(".py") for argument in self._config.args)
        keyword = self._config.getoption("keyword")
        named |= bool(keyword) and not Expression.compile(keyword).evaluate(lambda *_, **__: False)
        return named or self._config.getoption("--everything")

    def _marked(self, item: pytest.Item) -> bool:
        """True if -m selects the item for one of `MARKS`, and not for its other marks or for those that it lacks."""
        others = {mark.name for mark in item.iter_markers()} - set(MARKS)
        selects = self._config.getoption("markexpr")
        return bool(selects) and not Expression.compile(selects).evaluate(lambda *name, **_: name[0] in others)

    def _costly(self, scenario: Scenario, place: Seat | Duel | None) -> str:
        """Why a run leaves the scenario out there unless it is chosen, in words; empty if it does not."""
        if scenario.bulk:
            return "of many requests or other stacks"
        if scenario.spoils:
            return "that spoil their stack"
        name = place.topology.name if place is not None else ""
        named = not name or name in self._config.getoption("--topology")
        return "" if named or topology_table.started_by_default(name, scenario.wave) else f"in {name}"

    def _outlook(self, items: Sequence[pytest.Item]) -> list[Start]:
        """The coming starts, in order. Scenarios whose required capabilities the target lacks start nothing."""
        options = self._options()
        driven: dict[Seat, list[Scenario]] = {}
        for item in items:
            scenario, seat = declaration(getattr(item, "obj", None)), _place(item)
            if scenario is not None and isinstance(seat, Seat) and seat.target in options.driven:
                able = scenario.needs <= self._targets[seat.target].capabilities
                driven.setdefault(seat, []).extend([scenario] if able else [])
        return [
            Start(
                target=seat.target,
                topology=seat.topology,
                scenarios=len(scenarios),
                takes=options.takes(seat.target),
                spoiling=sum(scenario.spoils for scenario in scenarios),
                kind="inline" if self._targets[seat.target].inline else options.start,
            )
            for seat, scenarios in driven.items()
            if scenarios
        ]

    def pytest_report_collectionfinish(self) -> list[str]:
        up = () if self._config.getoption("--fresh") else kept.names()
        seats = {f"{start.target}@{start.topology.name}": start for start in self._starts}
        real = [start for seat, start in seats.items() if start.kind != "inline" and seat not in up]
        name, run = self._config.stash[BASELINE]
        said = [f"baseline {name}: recorded earlier, in {run}"] if run is not None and self._selected else []
        said += [
            f"{seat} is up already, and is driven if it fits (--fresh: another one)" for seat in up if seat in seats
        ]
        if self._left_out:
            parts = ", ".join(f"{len(names)} {why}" for why, names in sorted(self._left_out.items(), reverse=True))
            said.append(f"left out: scenarios, {parts} (--everything adds them)")
        return said + (list(outlook.lines(real, self._options().engine, len(environments.list_gpus()))) if real else [])

    def _validate(self) -> None:
        option = self._config.getoption
        options = self._options()
        for flag, given in (("--target-python", options.target_python), ("--checkout", options.checkouts)):
            if idle := sorted(set(given) - {known for name in options.driven for known in wider(name)}):
                raise UsageError(
                    f"{flag} names {', '.join(idle)}, which this run does not drive", next_step="correct it"
                )
        for name in options.driven:
            target = self._targets[name] = resolve(name, options.target_python, options.checkouts)
            if target.checkout is not None and target.python is None:
                needs_of(target, options.engine)  # refuses a tree that pins nothing
        if options.compares and options.baseline == options.candidate:
            raise UsageError(
                "baseline and candidate are the same target",
                next_step="use --stack to judge one alone; give two local targets labels: --baseline local:http#old --candidate "
                "local:http#new --checkout local:http#old=PATH --checkout local:http#new=PATH",
            )
        if option("--engines") < 1 or option("--repeat") < 1:
            raise UsageError("--engines and --repeat count from 1")
        if not 0 < option("--budget") <= MOST_BUDGET:
            raise UsageError(
                f"--budget {option('--budget'):g} is not above 0 and at most {MOST_BUDGET}",
                next_step="1 is the usual extent; try 0.2 for a fifth of it",
            )
        if option("--twin") and option("--no-twin"):
            raise UsageError("--twin and --no-twin exclude each other", next_step="leave one out")
        options.check()
        if option("--model") not in (None, *models.NAMED):
            models.check_model(Path(option("--model")))
        if option("--profile") is not None:
            profiles.named(option("--profile"))
        self._known = ledger.load(option("--ledger"))

    def _options(self) -> Options:
        option = self._config.getoption
        engine = option("--engine")
        return Options(
            baseline=self._config.stash[BASELINE][0],
            recorded=self._config.stash[BASELINE][1],
            stacks=option("--stack"),
            engine=environments.detect_engine() if engine == "auto" else engine,
            target_python=of_local("--python", option("--target-python")),
            checkouts=of_local("--checkout", option("--checkout")),
            twin=False if option("--no-twin") else option("--twin") or None,
            reuse=not option("--fresh"),
            **{name: option(cli.option_of(name)) for name in OF_THE_SAME_NAME},
            command="pytest " + shlex.join(str(a) for a in self._config.invocation_params.args),
        )

    def _begun(self) -> Session:
        if self._session is None:
            self._session = Session(self._options(), self._progress, selected=self._selected, tell=self._write)
            if self._config.get_verbosity() > 0:
                self._logs = LogStream(self._session.folder.path / "logs", self._write)
        return self._session

    @contextmanager
    def _uncaptured(self) -> Iterator[None]:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            yield
            return
        with capture.global_and_fixture_disabled():
            yield

    @contextmanager
    def _progress(self, message: str) -> Iterator[Say]:
        with self._uncaptured():
            sys.stderr.write("\n")
            step: AbstractContextManager[Say] = console_progress()(message)
            with step as say:
                yield say

    def _write(self, line: str) -> None:
        with self._uncaptured():
            sys.stderr.write(line + "\n")

    # --- one item

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        scenario, place = declaration(pyfuncitem.obj), _place(pyfuncitem)
        if scenario is None or place is None:
            return None
        if self._broken is not None:
            pytest.fail(f"not driven: {self._broken}", pytrace=False)
        try:
            verdicts = self._verdicts(pyfuncitem, scenario, place)
            beside = self._begun().of_both(scenario, place.topology) if isinstance(place, Duel) else []
        except HarnessError as e:
            self._broken = e
            pytest.exit(f"{type(e).__name__}: {e}", returncode=2)
        _settle(verdicts, beside, self._known.holding_for(self._begun().released))
        return True

    def _verdicts(self, item: pytest.Function, scenario: Scenario, place: Seat | Duel) -> list[Verdict]:
        session = self._begun()
        if isinstance(place, Duel):
            return session.compare(scenario, place.topology)
        seed = session.options.seed
        return session.drive(
            scenario, place, lambda live: item.obj(stack=live, prompts=Prompts(scenario.name, live.vocabulary, seed))
        )

    # --- the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """End the session, judge the whole run from its recordings, write the reports."""
        if self._session is None:
            return
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED or self._broken is not None
        self._session.close("interrupted" if interrupted else "completed")
        if self._logs is not None:
            self._logs.stop()
        try:
            self._finish(self._session)
        except HarnessError as e:
            self._broken = self._broken or e
            session.exitstatus = 2
            return
        if session.exitstatus == pytest.ExitCode.OK and self._judgement is not None:
            session.exitstatus = self._judgement.exit_status

    def _finish(self, session: Session) -> None:
        from reports.render import write_all

        judgement = judge_run(session.folder.path, ledger=session.options.ledger)
        judging = session.seconds.get("judge", 0.0) + judgement.run.seconds["judge"]  # while driving, and now
        judged = _took(judgement, judge=judging)
        with session.timed("report"):
            self._report = write_all(judged, session.folder.path, ledger=self._known)["report.html"]
        self._judgement = _took(judged, report=round(session.seconds["report"], 2))  # no report can hold its own time
        session.folder.write_info(msgspec.structs.replace(self._judgement.run, headers=[]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._broken is not None:
            terminalreporter.section("parity", sep="=", red=True)
            terminalreporter.line(f"{type(self._broken).__name__}: {self._broken}")
        if self._judgement is not None:
            from rich.console import Console

            from reports.terminal import show

            terminalreporter.section("parity", sep="=")
            show(self._judgement, Console(file=sys.stdout, highlight=False), report=self._report)
            errors = [_error(name, message) for name, message in self._without_an_item(self._judgement)]
            terminalreporter.stats.setdefault("error", []).extend(errors)

    def _without_an_item(self, judgement: Judgement) -> list[tuple[str, str]]:
        """What makes the run red and failed no item, by name: else pytest's summary would say that all passed."""
        items = {name for names in self._selected.values() for name in names}
        reds = [v for v in judgement.verdicts if v.red and v.scenario not in items]
        return [
            *((f"ledger::{one.entry}", one.problem) for one in judgement.ledger_problems),
            *((f"run::{v.id}", f"{v.status}: {v.told}") for v in reds),
        ]


def _took(judgement: Judgement, **seconds: float) -> Judgement:
    run = msgspec.structs.replace(judgement.run, seconds=judgement.run.seconds | seconds)
    return msgspec.structs.replace(judgement, run=run)


def _error(nodeid: str, message: str) -> pytest.TestReport:
    """An error of no item, for pytest's summary."""
    return pytest.TestReport(
        nodeid=nodeid, location=("", None, nodeid), keywords={}, outcome="failed", longrepr=message, when="setup"
    )


def _place(item: pytest.Item) -> Seat | Duel | None:
    callspec = getattr(item, "callspec", None)
    place = callspec.params.get("stack") if callspec is not None else None
    return place if isinstance(place, Seat | Duel) else None


def _in_order(places: Sequence[Seat | Duel | None]) -> list[Seat | Duel]:
    """Each place once, in order of first appearance: stacks by topology, then comparisons."""
    seats = list(dict.fromkeys(p for p in places if isinstance(p, Seat)))
    duels = list(dict.fromkeys(p for p in places if isinstance(p, Duel)))
    targets = list(dict.fromkeys(s.target for s in seats))
    topologies = [s.topology.name for s in seats]
    seats.sort(key=lambda s: (topologies.index(s.topology.name), targets.index(s.target)))
    return [*seats, *duels]


def _selected(items: Iterable[pytest.Item]) -> dict[Topology, list[str]]:
    """Topology → names of the items' scenarios that are driven there, each once."""
    found: dict[Topology, dict[str, None]] = {}
    for item in items:
        scenario, place = declaration(getattr(item, "obj", None)), _place(item)
        if scenario is not None and isinstance(place, Seat):
            found.setdefault(place.topology, {})[scenario.name] = None
    return {topology: list(names) for topology, names in found.items()}


def _settle(verdicts: Sequence[Verdict], beside: Sequence[Verdict], known: Ledger) -> None:
    """Turn an item's verdicts into pytest's outcome: fail, xfail (all red ones are in the ledger), skip, or pass.

    For a comparison, `beside` holds each stack's own verdicts. A ledger entry that explains these explains the comparison.
    """
    __tracebackhide__ = True
    together, _ = ledger.apply(known, [*beside, *verdicts], datetime.now(UTC).date())
    explained = together[len(beside) :]
    if red := [v for v in explained if v.red]:
        causes_first = sorted(red, key=lambda v: v.because is not None)
        pytest.fail("\n\n".join(_told(v) for v in causes_first), pytrace=False)
    if entries := sorted({v.known for v in explained if v.known is not None}):
        pytest.xfail(f"known divergence: {', '.join(entries)}")
    if explained and all(v.status == "missing" for v in explained):
        pytest.skip(explained[0].reason)


def _told(verdict: Verdict) -> str:
    lines = [
        f"{verdict.status.upper()} {verdict.check}: {verdict.told}"
        + (f" (because of {verdict.because})" if verdict.because else ""),
        f"  promise: {verdict.promise}",
        f"  blame: {verdict.blame}   facts: {verdict.facts}   source: {verdict.source}",
    ]
    lines += [f"  {name} = {value:.3g}" for name, value in verdict.numbers.items()]
    shown = [around_the_difference(piece) for piece in verdict.evidence[:2]]
    lines += [f"  evidence: {msgspec.json.encode(piece).decode()[:600]}" for piece in shown]
    if verdict.next_step:
        lines.append(f"  next: {verdict.next_step}")
    return "\n".join(lines)
