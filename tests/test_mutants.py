"""Mutants: made from text alone, swapped into a running process and out again, judged by what turns red and what does not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache

import jsonschema
import msgspec
import pytest

from backends.taps import swaps
from backends.taps.swaps import Refused, Swapper, everywhere
from harness import PROJECT
from harness.contract.errors import Blame, CallTimedOut, StackDied, StartFailed, UsageError
from harness.contract.faults import DRIVEN
from harness.contract.messages import Swap, SwapRequest, SwapResult
from harness.machine.progress import silent
from harness.machine.targets import registry
from harness.proving import mutants
from harness.proving.kill_matrix import Baseline
from harness.proving.mutants import Fate, MutantProof, MutantRun, Proving, Request, code_of, judge
from harness.proving.mutations import Equivalent, explained, is_public, mutated, sample, survey
from harness.records.verdict import Cause
from harness.running import catalogue
from reports import mutants as report
from tests.kill_matrices import verdict

SOURCE = '''
"""A module."""
import abc, functools
from typing import Optional

LIMIT = 1 + 1

def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

class Client:
    """A client."""

    def add(self, a: int, b: int = 3) -> Optional[int]:
        """Adds."""
        return a + b

    @staticmethod
    def twice(a):
        return a * 2

    @property
    def name(self):
        return "client"

    @logged
    def wrapped(self, a):
        logger.info("called")
        return a - 1

    def _private(self):
        return False

    @abc.abstractmethod
    def left_to_others(self):
        return 1

def handlers(offset):
    @logged
    def handler(a):
        return a + offset
    return handler
'''


A, B, C = sorted(name for name in catalogue.declared() if name.startswith("ordering."))[:3]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`SOURCE` in this process. Scenario A calls add(), B calls add() and twice()."""
    file = tmp_path / "tiny_stack.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("tiny_stack", file)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tiny_stack", made)
    spec.loader.exec_module(made)
    made.logger = type("Logger", (), {"info": staticmethod(lambda _: None)})
    monkeypatch.setattr(catalogue, "body", {A: calling("add"), B: calling("add", "twice")}.__getitem__)
    return made


def calling(*names):
    """A scenario that calls these functions of the client."""

    async def body(stack):
        for name in names:
            await getattr(stack, name)()

    return body


@cache
def surveyed():
    return {m.id: m for m in survey("tiny_stack", SOURCE).mutants}


def of(function: str, operator: str, occurrence: int = 0):
    return surveyed()[f"tiny_stack:{function}:{operator}:{occurrence}"]


PLUS, TIMES, NAME = ("Client.add", "swap_op"), ("Client.twice", "swap_op"), ("Client._private", "name")


# --- making them


def test_only_bodies_of_functions_are_changed_and_each_change_has_an_id_of_its_own():
    surveyed = survey("tiny_stack", SOURCE)
    assert surveyed.functions == (
        "logged", "logged.<locals>.wrapper", "Client.add", "Client.twice", "Client.name", "Client.wrapped", "Client._private",
        "handlers", "handlers.<locals>.handler",
    )  # fmt: skip
    assert surveyed.public == [
        "tiny_stack:logged", "tiny_stack:Client.add", "tiny_stack:Client.twice", "tiny_stack:Client.name",
        "tiny_stack:Client.wrapped", "tiny_stack:handlers",
    ]  # fmt: skip
    ids = [m.id for m in surveyed.mutants]
    assert len(set(ids)) == len(ids)
    assert {m.function for m in surveyed.mutants} <= set(surveyed.functions)
    assert not [m for m in surveyed.mutants if "LIMIT" in m.before or "Adds" in m.before or "= 3" in m.before]
    plus = of("Client.add", "swap_op")
    assert (plus.before, plus.after, plus.line, plus.place) == (
        "return a + b", "return a - b", 19, "tiny_stack:Client.add",
    )  # fmt: skip
    assert of("logged", "arg_removal").before == "@functools.wraps(function)", (
        "an inner decorator belongs to the outer function"
    )


def test_the_same_text_gives_the_same_mutants_and_the_same_seed_the_same_sample():
    one, other = survey("tiny_stack", SOURCE), survey("tiny_stack", SOURCE)
    assert one.mutants == other.mutants
    assert sample(one.mutants, 5, 7) == sample(other.mutants, 5, 7)
    assert sample(one.mutants, 5, 7) != sample(one.mutants, 5, 8)
    assert len(sample(one.mutants, 10**6, 7)) == len(one.mutants)


def test_a_mutant_is_made_again_from_its_id():
    text = mutated(of("Client.add", "swap_op"), SOURCE)
    assert [line for line in text.splitlines() if line not in SOURCE.splitlines()] == ["        return a - b"]
    with pytest.raises(UsageError, match=r"there is no mutant tiny_stack:Client\.add:swap_op:0"):
        mutated(of("Client.add", "swap_op"), "x = 1")


def test_equivalent_mutants_are_left_out_with_their_reason():
    every = survey("tiny_stack", SOURCE).mutants
    entries = [
        Equivalent(statement="logger.*", reason="only logged"),
        Equivalent(mutant="*:Client.name:string:*", statement="*client*", reason="not shown"),
        Equivalent(statement="return a + b", becomes="return b*", reason="another change"),
    ]
    found = explained(every, entries)
    assert set(found.values()) == {"only logged", "not shown"}
    assert all(":Client.wrapped:" in name or ":Client.name:" in name for name in found)
    code = code_of({"tiny_stack": SOURCE}, entries)
    assert set(code.equivalent) == set(found)
    assert len(code.mutants) == len(every), "a new entry does not change what a seed draws"


def test_what_is_public():
    assert is_public("Client.generate")
    assert not is_public("_Client.generate")
    assert not is_public("Client._post")
    assert not is_public("Client.generate.<locals>.one")


# --- swapping


@pytest.mark.parametrize(
    ("function", "operator", "values", "call"),
    [
        ("Client.add", "swap_op", (5, -1), lambda m: m.Client().add(2, 3)),
        ("Client.twice", "swap_op", (6, 1.5), lambda m: m.Client.twice(3)),
        ("Client.name", "string", ("client", "XXclientXX"), lambda m: m.Client().name),
        ("Client.wrapped", "swap_op", (4, 6), lambda m: m.Client().wrapped(5)),
    ],
)
def test_a_function_takes_other_code_and_its_own_back(module, function, operator, values, call):
    before, after = values
    mutant, swapper = of(function, operator), Swapper()
    assert call(module) == before
    assert swapper.swap("tiny_stack", function, mutated(mutant, SOURCE)) == 1
    assert call(module) == after
    swapper.put_back()
    assert call(module) == before


def test_closures_that_exist_already_take_other_code_and_new_ones_lose_it(module):
    old, swapper = module.handlers(10), Swapper()
    assert (
        swapper.swap(
            "tiny_stack", "handlers.<locals>.handler", mutated(of("handlers.<locals>.handler", "swap_op"), SOURCE)
        )
        == 2
    )
    new = module.handlers(10)
    assert (old(1), new(1)) == (-9, -9)
    swapper.put_back()
    assert (old(1), new(1), module.handlers(10)(1)) == (11, 11, 11)


@pytest.mark.parametrize(
    ("function", "source", "says"),
    [
        ("Client.gone", SOURCE, "is not in tiny_stack as its file has it"),
        ("Client.add", SOURCE.replace("return a + b", "return a +"), "does not compile"),
        ("Client.add", SOURCE.replace("def add(", "def added("), "1 times, and 0 times"),
        (
            "handlers",
            SOURCE.replace("return a + offset", "return a + module_level"),
            "other variables of its surroundings",
        ),
    ],
)
def test_what_cannot_be_swapped_is_refused_and_nothing_has_changed(module, function, source, says):
    existing, swapper = module.handlers(10), Swapper()
    with pytest.raises(Refused, match=says):
        swapper.swap("tiny_stack", function, source)
    assert (module.Client().add(2, 3), existing(1)) == (5, 11)


def test_one_order_swaps_several_functions_or_none(module):
    swapper = Swapper()
    plus, times = (
        {"module": "tiny_stack", "function": name, "source": mutated(of(name, operator), SOURCE)}
        for name, operator in (PLUS, TIMES)
    )
    assert swapper.order({"swaps": [plus, times]})["swapped"] == 2
    assert (module.Client().add(2, 3), module.Client.twice(3)) == (-1, 1.5)
    refused = swapper.order({"swaps": [plus, {**times, "source": "def"}]})
    assert (refused["swapped"], "does not compile" in refused["refused"]) == (0, True)
    assert (module.Client().add(2, 3), module.Client.twice(3)) == (5, 6)


def test_a_process_without_the_module_swaps_nothing():
    assert Swapper().swap("nowhere", "f", SOURCE) == 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring: the stacks run on Python 3.12")
def test_lines_that_run_are_noted_once_between_two_orders(module):
    swapper, order = Swapper(), {"watch": ["tiny_stack"]}
    swapper.order(order)
    for _ in range(3):
        module.Client().add(1, 2)
        module.handlers(1)(1)
    assert swapper.order(order)["called"] == {
        "tiny_stack:Client.add": [19],
        "tiny_stack:handlers": [42, 43, 45],
        "tiny_stack:handlers.<locals>.handler": [44],
        "tiny_stack:logged.<locals>.wrapper": [11],
        "tiny_stack:logged": [9, 10, 12],
    }
    assert swapper.order(order)["called"] == {}
    module.Client().add(1, 2)
    assert list(swapper.order({})["called"]) == ["tiny_stack:Client.add"]
    sys.monitoring.free_tool_id(swaps.TOOL)


CHILD = """
import os, signal, sys
from pathlib import Path
from backends.taps import swaps
sys.path.insert(0, sys.argv[1])
import tiny_stack
swaps.listen(Path(sys.argv[1]))
ready, tell = os.pipe()
if (child := os.fork()) == 0:
    os.write(tell, b"x")
    signal.pause()
os.read(ready, 1)
print("ready", flush=True)
sys.stdin.read(1)
print(tiny_stack.Client().add(2, 3), flush=True)
os.kill(child, signal.SIGKILL)
os.wait()
"""


def test_every_process_that_listens_takes_the_order_also_forked_ones(tmp_path):
    (tmp_path / "tiny_stack.py").write_text(SOURCE)
    running = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
    )
    with running:
        assert running.stdout.readline() == "ready\n"
        swap = {
            "module": "tiny_stack",
            "function": "Client.add",
            "source": mutated(of("Client.add", "swap_op"), SOURCE),
        }
        answers = everywhere(tmp_path, {"watch": [], "swaps": [swap]})
        assert sorted(a["swapped"] for a in answers) == [1, 1]
        assert len({a["pid"] for a in answers}) == 2
        running.stdin.write("\n")
        running.stdin.flush()
        assert running.stdout.readline() == "-1\n"
    assert everywhere(tmp_path, {}) == [], "the processes have ended"


# --- judging


def ended(
    error: str, message: str = "missing argument: 'n'", *, phase: str = "scenario", status: str = "fail",
    blame: Blame = Blame.STACK, http: int | None = None, place: str = "",
):  # fmt: skip
    evidence = [{"error": error, "message": message, "status": http, "phase": phase, "place": place}]
    return verdict(
        A, "tokens", status, f"could not be driven: {error}", cause=Cause.NOT_DRIVEN, evidence=evidence, blame=blame
    )


@pytest.mark.parametrize(
    ("reds", "fate", "by"),
    [
        ([], None, []),
        ([verdict(A, "ordering:late", "fail"), verdict(A, "tokens", "untestable")], Fate.KILLED, ["ordering"]),
        ([verdict(A, "tokens", "fail", "known already")], None, []),
        ([verdict(A, "tokens", "untestable", "no facts")], Fate.ACCIDENT, ["tokens"]),
        ([verdict(A, "tokens", "untestable", "check raised", cause=Cause.RAISED)], Fate.ACCIDENT, ["tokens"]),
        ([ended("TypeError")], Fate.KILLED, [DRIVEN]),
        ([ended("KeyError", phase="clean_room")], Fate.ACCIDENT, [DRIVEN]),
        ([ended("StackDied")], Fate.ACCIDENT, [DRIVEN]),
        ([ended("IndexError", "list index out of range")], Fate.ACCIDENT, [DRIVEN]),
        ([ended("MissedMoment", status="untestable", blame=Blame.HARNESS)], None, []),
        ([ended("X", status="untestable", blame=Blame.HARNESS)], Fate.ACCIDENT, [DRIVEN]),
    ],
)  # fmt: skip
def test_a_check_or_a_failed_call_kills_and_a_crash_of_everything_is_an_accident(reds, fate, by):
    control = [verdict(A, "ordering:late"), verdict(A, "tokens", "fail", "known already")]
    kill = judge(reds, Baseline(control))
    assert (kill and kill.fate, kill.by if kill else []) == (fate, by)


@pytest.mark.parametrize(
    ("error", "message", "http", "named"),
    [
        ("TypeError", "missing 1 required positional argument: 'n'", None, True),
        ("KeyError", "'token_ids'", None, True),
        ("ValueError", "names and shapes must have the same length. Got names=7, shapes=8", None, True),
        ("BadRequestError", "", 400, True),
        ("ClientConnectorError", "Cannot connect to host 127.0.0.1:8001", None, True),
        ("CallTimedOut", "generate did not return within 8 s; the stack was killed", None, True),
        ("TypeError", "'NoneType' object does not support item assignment", None, False),
        ("IndexError", "list index out of range", None, False),
        ("AssertionError", "", None, False),
        ("ScenarioTimedOut", "not driven to its end within 8 s", None, False),
        ("StackDied", "the engine 'EngineCore_0' ended", None, False),
    ],
)
def test_a_failed_call_names_the_matter_if_its_error_says_what_is_wrong(error, message, http, named):
    assert mutants.names_the_matter(ended(error, message, http=http)) is named
    by_place = named or error not in mutants.NAMELESS
    assert (
        mutants.names_the_matter(ended(error, message, http=http, place="tiny_stack.py:19 in add: a + b")) is by_place
    )


FROM_THE_START = """
import os, sys
from pathlib import Path
from backends.taps import swaps
swaps.listen(Path(sys.argv[1]))
sys.path.insert(0, sys.argv[1])
import tiny_stack
print(tiny_stack.Client().add(2, 3), tiny_stack.Client.twice(3), flush=True)
"""


def test_an_order_in_the_folder_is_in_force_from_the_import_on(module, tmp_path):
    source = mutated(of("Client.add", "swap_op"), SOURCE)
    swaps.lay(
        tmp_path, {"watch": ["tiny_stack"], "swaps": [{"module": "tiny_stack", "function": "x", "source": source}]}
    )
    said = subprocess.run(
        [sys.executable, "-c", FROM_THE_START, str(tmp_path)], capture_output=True, text=True, check=True, cwd=PROJECT
    )
    assert said.stdout.split() == ["-1", "6"]
    ran = [answer["called"] for answer in everywhere(tmp_path, {})]
    if sys.version_info >= (3, 12):
        assert ran == [{"tiny_stack:Client.add": [19], "tiny_stack:Client.twice": [23]}]
    assert everywhere(tmp_path, {}) == [], "what ran at the start is told once"


def test_a_process_that_is_started_anew_listens_if_it_finds_the_folder(tmp_path):
    known = {"PYTHONPATH": f"{swaps.SITE}:{PROJECT}", swaps.FOLDER: str(tmp_path)}
    listening = "import pathlib, sys; print(len(list(pathlib.Path(sys.argv[1]).glob('*.sock'))))"
    said = subprocess.run(
        [sys.executable, "-c", listening, str(tmp_path)], capture_output=True, text=True, check=True, env=known
    )
    assert said.stdout.strip() == "1"


# --- driving


class Tiny:
    """A session whose stack is `tiny_stack` in this process. Scenario A calls add(), B calls add() and twice()."""

    def __init__(
        self,
        module,
        *,
        dies_of: str = "",
        flaky: bool = False,
        interrupts: int = 0,
        runs_once: bool = False,
        starts_with: str = "",
        right: Callable[[str, list[object]], bool] = lambda _, seen: seen in ([5], [5, 6]),
    ) -> None:
        self._module, self._swapper = module, Swapper()
        self._dies_of, self._flaky, self._interrupts = dies_of, flaky, interrupts
        self._lives = True
        self._runs_once = runs_once
        self._starts_with = starts_with
        """Function of the client that only a start calls."""
        self._right = right
        self._begins: Swap | None = None
        self.orders: list[list[str]] = []
        self._fresh = True
        self._called: list[str] = []
        self.drives: list[str] = []
        self.renewed = 0
        self.closed = ""

    def swap(self, _seat, request: SwapRequest) -> SwapResult:
        self._lives = True
        self.orders.append([one.function for one in request.swaps])
        answer = self._swapper.order(msgspec.to_builtins(request))
        if self._fresh and self._starts_with:
            self._called.append(f"tiny_stack:Client.{self._starts_with}")
        self._fresh = False
        called, self._called = dict.fromkeys(self._called, range(100)), []
        called = {name: list(lines) for name, lines in called.items()}
        return SwapResult(called=called, swapped=answer["swapped"], refused=answer["refused"])

    def drive(self, scenario, seat, body):
        if self._interrupts and len(self.drives) == self._interrupts:
            raise KeyboardInterrupt
        self.drives.append(scenario.name)
        seen: list[object] = []

        class Stack:
            async def swap(_self, request):  # noqa: N805
                return self.swap(seat, request)

            async def add(_self):  # noqa: N805
                if len(self.drives) <= 2 or not self._runs_once:
                    self._called.append("tiny_stack:Client.add")
                seen.append(self._module.Client().add(2, 3))

            async def twice(_self):  # noqa: N805
                self._called.append("tiny_stack:Client.twice")
                seen.append(self._module.Client.twice(3))

        asyncio.run(body(Stack()))
        good = self._right(scenario.name, seen) and self._begins is None and not (self._flaky and len(self.drives) > 2)
        if self._dies_of and not good:
            self._lives = False
            died = [{"error": self._dies_of, "message": "the stack's 'engine' ended", "phase": "scenario"}]
            return [verdict(scenario.name, "sum", "fail", "could not be driven", cause=Cause.NOT_DRIVEN, evidence=died)]
        return [verdict(scenario.name, "sum", "pass" if good else "fail")]

    def living(self, _seat):
        return self._lives

    def renew(self, _seat, swap=None):
        self.renewed += 1
        self._fresh, self._begins = True, swap

    def close(self, outcome="completed"):
        self.closed = outcome


def proved(session, chosen, *, names=None, excluded=(), **request) -> MutantProof:
    code = code_of({"tiny_stack": SOURCE}, [Equivalent(mutant="*:Client.name:*", reason="not shown")], excluded)
    told: list[str] = []
    proving = Proving(Request(stacks=("toy",), sample=0, seed=3, **request), code, chosen, "toy", told.append)
    topology = catalogue.declared()[A].driven_in(2)[0]
    try:
        proving.drive(session, [(mutants.Seat(target="toy", topology=topology), names or (A, B))])
    except KeyboardInterrupt:
        proving.error = "interrupted"
    return proving.proof()


def test_an_error_while_a_stack_ends_keeps_what_was_judged(module, monkeypatch, tmp_path):
    class Stuck(Tiny):
        def close(self, outcome="completed"):
            raise TimeoutError(f"the stack does not end ({outcome})")

    seat = mutants.Seat(target="toy", topology=catalogue.declared()[A].driven_in(2)[0])
    monkeypatch.setattr(mutants, "load", lambda *_: code_of({"tiny_stack": SOURCE}, []))
    monkeypatch.setattr(mutants, "chosen", lambda *_: [of(*PLUS)])
    monkeypatch.setattr(mutants, "seats_of", lambda *_: [(seat, (A, B))])
    request = Request(stacks=("miniature",), sample=1, seed=3, run_dir=tmp_path / "run")
    finished = mutants.prove_mutants(request, silent, [].append, lambda *_: Stuck(module))
    assert [one.fate for proof in finished.run.proofs for one in proof.judged] == [Fate.KILLED]
    assert finished.run.outcome == "TimeoutError: the stack does not end (completed)"
    assert isinstance(finished.error, TimeoutError)
    assert finished.run.exit_status == 1


def test_only_scenarios_that_call_the_function_are_driven_until_one_turns_red(module):
    session = Tiny(module)
    shown = of("Client.name", "string")
    proof = proved(session, [of(*PLUS), of(*TIMES), of(*NAME), shown])
    plus, times, name, left_out = proof.judged
    assert (plus.fate, plus.by, plus.driven, plus.callers, plus.fired) == (Fate.KILLED, ["sum"], 1, 2, True)
    assert (times.fate, times.scenario, times.driven, times.callers) == (Fate.KILLED, B, 1, 1)
    assert name.fate == Fate.UNREACHED
    assert (left_out.fate, left_out.reason) == (Fate.EQUIVALENT, "not shown")
    assert session.drives[:2] == [A, B], "the control comes first"
    assert session.drives[-2:] == [B, B], "and the scenario that turned red has to be green again without the mutant"
    assert (proof.score, proof.unreached) == (
        1.0, ["tiny_stack:logged", "tiny_stack:Client.name", "tiny_stack:Client.wrapped", "tiny_stack:handlers"],
    )  # fmt: skip
    assert module.Client().add(2, 3) == 5


def test_the_error_of_a_scenario_that_ended_the_stack_is_not_hidden_by_the_swap_back(monkeypatch):
    async def hangs(_stack):
        raise CallTimedOut("generate did not return within 8 s")

    class Gone:
        swaps = 0

        async def swap(self, _request):
            self.swaps += 1
            if self.swaps == 2:
                raise StackDied("the host's connection broke during swap")
            return SwapResult(called={}, swapped=1, refused="")

    class Ended(Tiny):
        def drive(self, _scenario, _seat, body):
            with pytest.raises(CallTimedOut):
                asyncio.run(body(Gone()))
            return []

    monkeypatch.setattr(catalogue, "body", lambda _: hangs)
    proving = Proving(Request(stacks=("toy",), sample=0, seed=3), code_of({}, []), [], "toy", print)
    seat = mutants.Seat(target="toy", topology=catalogue.declared()[A].driven_in(2)[0])
    told = proving._under(Ended(None), seat, [Swap(module="m", function="f", source="")], GREEN)
    assert (told.refused, told.called) == ("", {})


def test_scenarios_with_untried_checks_and_little_cost_come_first_after_those_that_killed():
    one, other, third = (
        mutants.Ran(scenario=name, topology="t", seconds=s, green=True, called={})
        for name, s in (("errors.test_an_empty_batch", 0.2), ("ordering.test_batches_of_any_size", 0.3), (A, 0.2))
    )
    proving = Proving(Request(stacks=("toy",), sample=0, seed=3), code_of({}, []), [], "toy", print)
    same = msgspec.structs.replace(one, seconds=0.21)
    assert proving._in_order(of(*PLUS), [same, one, other])[:2] == [one, other], "`same` repeats the first one's checks"
    proving._killers[of(*PLUS).place] = [third.scenario]
    assert proving._in_order(of(*PLUS), [one, third])[0] == third


def test_a_mutant_that_nothing_sees_survives_every_scenario_that_calls_it(module):
    unseen = msgspec.structs.replace(of("Client.add", "swap_op"))
    session = Tiny(module)
    session._module = type("Same", (), {"Client": type("C", (), {"add": lambda *_: 5, "twice": lambda *_: 6})})
    proof = proved(session, [unseen])
    [judged] = proof.judged
    assert (judged.fate, judged.driven, judged.callers, proof.score) == (Fate.SURVIVED, 2, 2, 0.0)


@pytest.mark.parametrize("minutes", [None, 0.001])
def test_a_mutant_whose_statement_ran_in_the_control_only_gets_a_start_of_its_own(module, minutes, monkeypatch):
    session = Tiny(module, runs_once=True)
    session._module = type("Same", (), {"Client": type("C", (), {"add": lambda *_: 5, "twice": lambda *_: 6})})
    late = iter([False, False, False, True])
    if minutes:
        monkeypatch.setattr(Proving, "_late", property(lambda _: next(late, True)))
    [judged] = proved(session, [of(*PLUS)], minutes=minutes).judged
    if minutes:
        assert (judged.fate, judged.reason, judged.driven) == (Fate.UNREACHED, mutants.ONCE, 2)
    else:
        assert (judged.fate, judged.started, judged.driven) == (Fate.KILLED, True, 3)


def test_survivors_are_driven_together_and_apart_if_one_of_them_is_seen(module, monkeypatch):
    bodies = {A: calling("add"), B: calling("twice"), C: calling("add", "twice")}
    monkeypatch.setattr(catalogue, "body", bodies.__getitem__)
    monkeypatch.setattr(mutants, "ALONE_S", 0.0)
    monkeypatch.setattr(Proving, "_in_order", lambda _self, _mutant, callers: list(callers))
    session = Tiny(module, right=lambda name, seen: name != C or seen[0] == 5)
    proof = proved(session, [of(*PLUS), of(*TIMES)], names=(A, B, C))
    plus, times = proof.judged
    assert (plus.fate, plus.scenario, plus.passed, plus.callers) == (Fate.KILLED, C, [A], 2)
    assert (times.fate, times.passed, times.driven, times.callers) == (Fate.SURVIVED, [B, C], 2, 2)
    assert session.drives[:3] == [A, B, C], "the control"
    assert session.drives[3:6] == [A, B, C], "each alone, as far as its time goes, then both"
    assert ["Client.add", "Client.twice"] in session.orders
    assert proved(Tiny(module), [of(*PLUS), of(*TIMES)], names=(A, B, C), earlier=(proof,)).judged == [plus, times]


def test_a_stack_that_dies_of_it_is_an_accident(module):
    proof = proved(Tiny(module, dies_of="StackDied"), [of(*PLUS)])
    assert [one.fate for one in proof.judged] == [Fate.ACCIDENT]
    assert proof.score == 0.0


def test_a_scenario_that_is_red_without_the_mutant_too_kills_nothing(module):
    session = Tiny(module, flaky=True)
    proof = proved(session, [of(*PLUS)])
    assert [(one.fate, one.reason.partition(" ")[2]) for one in proof.judged] == [
        (Fate.SKIPPED, "turned red without it too")
    ]
    assert session.renewed == 2


@pytest.mark.parametrize("reds", [1, 2])
def test_a_red_scenario_of_the_control_is_driven_again_on_a_fresh_stack(module, reds):
    asked: list[str] = []

    def right(name: str, seen: list[object]) -> bool:
        asked.append(name)
        return seen in ([5], [5, 6]) and not (name == A and asked.count(A) <= reds)

    session = Tiny(module, right=right)
    proof = proved(session, [of(*PLUS)])
    assert (session.drives[:3], session.renewed) == ([A, B, A], 1)
    assert [(one.green, one.red_once) for one in proof.control] == [(False, reds == 1), (True, False)]
    assert proof.problems == ([] if reds == 1 else [f"red without a mutant: {A} (sum: sum is wrong)"])
    assert [(one.fate, one.scenario) for one in proof.judged] == [(Fate.KILLED, B)], "it judges no mutant"


@pytest.mark.parametrize("at_start", [False, True])
def test_code_that_runs_only_before_a_scenario_is_changed_from_the_start(module, at_start):
    session = Tiny(module, starts_with="_private")
    proof = proved(session, [of(*PLUS), of(*NAME), of("Client.name", "string")], at_start=at_start)
    plus, private, _ = proof.judged
    assert plus.fate == (Fate.NOT_DRIVEN if at_start else Fate.KILLED)
    assert (private.fate, private.by, private.driven, private.fired) == (Fate.KILLED, ["sum"], 1, True)
    assert [*proof.prepared] == ["tiny_stack:Client._private"]
    assert session.renewed == 2, "with the mutant, and without it for the scenario that turned red"
    assert session._begins is None


def test_a_survivor_whose_statement_a_start_runs_too_gets_a_start_of_its_own(module):
    session = Tiny(module, starts_with="add")
    session._module = type("Same", (), {"Client": type("C", (), {"add": lambda *_: 5, "twice": lambda *_: 6})})
    [judged] = proved(session, [of(*PLUS)]).judged
    assert (judged.fate, judged.started, judged.driven) == (Fate.KILLED, True, 3)


def test_mutants_of_excluded_functions_are_not_reached(module):
    excluded = [mutants.Excluded(function="*:Client.add", reason="only a GPU calls it")]
    [judged] = proved(Tiny(module), [of(*PLUS)], excluded=excluded).judged
    assert (judged.fate, judged.reason, judged.driven) == (Fate.UNREACHED, "only a GPU calls it", 0)


@pytest.mark.parametrize(
    ("message", "fate"),
    [("StartFailed: unexpected keyword argument 'port'", Fate.KILLED), ("StackDied: no answer", Fate.ACCIDENT)],
)
def test_a_stack_that_does_not_start_is_killed_if_the_error_names_the_matter(module, message, fate):
    class Stays(Tiny):
        def swap(self, seat, request):
            if self._begins is not None:
                raise StartFailed(f"toy could not be started: {message}")
            return super().swap(seat, request)

    proof = proved(Stays(module, starts_with="_private"), [of(*NAME)])
    [private] = proof.judged
    assert (private.fate, private.by, private.driven) == (fate, ["start"], 0)
    assert report.figures_of(proof).killed_by_a_failed_call == (fate == Fate.KILLED)


def test_what_was_judged_before_an_interrupt_is_kept(module):
    proof = proved(Tiny(module, interrupts=4), [of(*PLUS), of(*TIMES)])
    assert [one.fate for one in proof.judged] == [Fate.KILLED, Fate.NOT_DRIVEN]


def test_a_control_that_was_interrupted_is_continued(module):
    first = proved(Tiny(module, interrupts=1), [of(*PLUS)])
    assert [one.scenario for one in first.control] == [A]
    session = Tiny(module)
    assert proved(session, [of(*PLUS)], earlier=(first,)).score == 1.0
    assert session.drives[0] == B


def test_a_resumed_run_drives_neither_the_control_nor_what_was_judged(module, tmp_path):
    first = proved(Tiny(module, interrupts=4), [of(*PLUS), of(*TIMES)])
    run = MutantRun(run_id="r", created_at="now", command="parity prove", outcome="interrupted", proofs=[first])
    report.write_all(run, tmp_path)
    session = Tiny(module)
    proof = proved(session, [of(*PLUS), of(*TIMES)], earlier=tuple(report.read(tmp_path)))
    assert [one.fate for one in proof.judged] == [Fate.KILLED, Fate.KILLED]
    assert (proof.judged[0], proof.control) == (first.judged[0], first.control)
    assert session.drives == [B, B], "under the mutant, and without it"
    again = proved(Tiny(module), [of(*PLUS)], earlier=(proof,), mutants=(of(*PLUS).id,))
    assert {one.id: one.fate for one in again.judged} == {of(*PLUS).id: Fate.KILLED, of(*TIMES).id: Fate.KILLED}
    with pytest.raises(UsageError, match="no-run"):
        report.read(tmp_path / "no-run")


def test_a_check_that_is_red_in_the_earlier_control_kills_nothing_in_a_resumed_run(module):
    first = proved(Tiny(module), [of(*NAME)])
    known = [msgspec.structs.replace(one, reds={"sum": "sum is wrong"}) for one in first.control]
    proof = proved(Tiny(module), [of(*TIMES)], earlier=(msgspec.structs.replace(first, control=known),))
    assert [one.fate for one in proof.judged] == [Fate.SURVIVED]


def test_no_mutant_begins_after_the_time_is_up(module):
    proof = proved(Tiny(module), [of(*PLUS), of(*TIMES)], minutes=0.0)
    assert {one.fate for one in proof.judged} == {Fate.NOT_DRIVEN}


def test_the_report_names_score_survivors_and_unreached_functions(module, tmp_path):
    session = Tiny(module)
    session._module = type("Same", (), {"Client": type("C", (), {"add": lambda *_: 5, "twice": module.Client.twice})})
    proof = proved(session, [of(*PLUS), of(*TIMES), of(*NAME)])
    assert proof.problems == []
    run = MutantRun(
        run_id="r", created_at="now", command="parity prove --mutants 3", outcome="completed", proofs=[proof]
    )
    page = report.write_all(run, tmp_path).read_text()
    written = json.loads((tmp_path / "mutants.json").read_bytes())
    jsonschema.Draft202012Validator(report.SCHEMA.made()).validate(written)
    assert (written["exit_status"], written["problems"]) == (0, {"toy": []})
    figures = written["figures"]["toy"]
    assert (figures["fates"]["survived"], figures["fates"]["not reached"]) == (1, 1)
    assert (figures["public_reached"], figures["public"]) == (2, 6)
    assert "| survived | 1 |" in page
    assert "### Survivors (1)" in page
    assert "- `tiny_stack:Client.add`" in page
    assert "`return a + b` → `return a - b`" in page
    assert "### Public functions that no scenario calls (4)" in page
    assert report.summary(proof)[0].startswith("toy: 50% of 2 judged mutants killed (seed 3, 3 mutants of")


GREEN = mutants.Ran(scenario=A, topology="t", seconds=1.0, green=True, called={"m:f": [1]})
JUDGED = mutants.Judged(id="m:f:op:0", function="m:f", line=1, before="1", after="2", fate=Fate.SURVIVED, fired=True)
PROOF = MutantProof(target="toy", seed=1, population=1, judged=[JUDGED], control=[GREEN], public=[], prepared={})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"error": "StackDied"}, "ended early: StackDied"),
        ({"control": []}, "the control drove no scenario"),
        ({"control": [msgspec.structs.replace(GREEN, green=False)]}, f"red without a mutant: {A} ()"),
        ({"control": [msgspec.structs.replace(GREEN, called={})]}, "the control saw no code run"),
        ({"judged": [msgspec.structs.replace(JUDGED, fate=Fate.SKIPPED)]}, "no mutant was judged"),
        (
            {"judged": [msgspec.structs.replace(JUDGED, fired=False)]},
            "no changed statement ran",
        ),
    ],
)  # fmt: skip
def test_an_instrument_that_did_not_work_is_red_and_a_survivor_is_not(fields, problem):
    assert PROOF.problems == []
    broken = msgspec.structs.replace(PROOF, **fields)
    assert broken.problems == [problem]
    run = MutantRun(run_id="r", created_at="now", command="", outcome="completed", proofs=[PROOF, broken])
    assert run.exit_status == 1


# --- what is listed


def test_stacks_with_mutants_list_their_modules_and_no_entry_is_without_a_reason():
    listed = {target.name: target.mutants for target in registry().values() if target.mutants and not target.local}
    assert listed, "at least one stack"
    for name, file in listed.items():
        data = tomllib.loads((PROJECT / file).read_text())
        if name in data["targets"]:
            assert data["targets"][name]["modules"]
        assert all(entry.reason for entry in msgspec.convert(data["equivalent"], list[Equivalent]))
        assert all(entry.reason for entry in msgspec.convert(data["excluded"], list[mutants.Excluded]))


def test_a_stack_without_a_list_and_an_unknown_id_are_named():
    with pytest.raises(UsageError, match="no code of 'miniature' is listed"):
        mutants.load(registry()["miniature"], silent, "cpu")
    code = code_of({"tiny_stack": SOURCE}, [])
    with pytest.raises(UsageError, match="there is no mutant tiny_stack:f:number:0"):
        mutants.chosen(code, Request(stacks=(), sample=0, seed=0, mutants=("tiny_stack:f:number:0",)))
