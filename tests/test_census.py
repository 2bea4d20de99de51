"""A census tells the same each time, and two of them tell everything that a caller has to change."""

import dataclasses
import enum
import functools
import types
import typing

import msgspec
import pytest

from backends.miniature.client import Client
from backends.miniature.faults import interface
from backends.miniature.interface import Interface
from harness.contract.errors import UsageError
from harness.contract.messages import CensusResult, Offer
from harness.driving import census
from harness.judging.census import (
    CENSUS,
    Entry,
    callable_names,
    called_names,
    compare,
    load,
    never_called,
    offered,
    shipped,
)
from harness.judging.noise import noise_floors
from harness.judging.parity import compare as side_by_side
from harness.records.recording import Raw
from harness.records.verdict import How, Judgement
from harness.running import catalogue
from reports import view
from tests import recordings, traces
from tests import test_parity as parity

RELEASED = "skyrl/client.py:12: what it does"


def by_name(result):
    return {offer.name: offer for offer in result.offers}


# --- introspection


class Mode(enum.Enum):
    KEEP = "keep"


@dataclasses.dataclass
class Batch:
    rows: "list[int]"
    mode: Mode = Mode.KEEP
    more: dict = dataclasses.field(default_factory=dict)


class Broken(RuntimeError):
    pass


def wrapped(function):
    @functools.wraps(function)
    async def inner(*args, **given):
        return await function(*args, **given)

    return inner


class Base:
    def inherited(self, *rest, **named) -> None: ...


class Shown(Base):
    gone = None

    def __init__(self, address: str, *, retries: int = 3):
        self.address = address
        self._retries = retries

    @property
    def size(self) -> int:
        return 1

    @wrapped
    async def generate(self, batch: Batch, session: "str | None" = None) -> "Batch":
        raise Broken("no")

    async def stream(self):
        yield 1

    def _private(self): ...


def test_everything_public_is_named_with_its_form_and_nothing_else():
    found = by_name(census.of(Shown("here"), types={}))
    assert {
        name: (o.kind, o.form, o.type, o.default) for name, o in found.items() if not name.startswith("raises")
    } == {
        "client": ("method", "sync", "", None),
        "client is Base": ("protocol", "", "", None),
        "client is Hashable": ("protocol", "", "", None),
        "client(address)": ("parameter", "positional or keyword", "str", None),
        "client(retries)": ("parameter", "keyword-only", "int", "3"),
        "generate": ("method", "async", "Batch", None),
        "generate(batch)": ("parameter", "positional or keyword", "Batch", None),
        "generate(session)": ("parameter", "positional or keyword", "str | None", "None"),
        "inherited": ("method", "sync", "None", None),
        "inherited(*rest)": ("parameter", "variadic positional", "", None),
        "inherited(**named)": ("parameter", "variadic keyword", "", None),
        "stream": ("method", "async generator", "", None),
        "address": ("attribute", "", "str", None),
        "size": ("attribute", "property", "int", None),
        "Batch.rows": ("field", "", "list[int]", None),
        "Batch.mode": ("field", "", "Mode", "<Mode.KEEP: 'keep'>"),
        "Batch.more": ("field", "", "dict", "{}"),
        "Mode.KEEP": ("field", "", "", "'keep'"),
    }
    assert found["raises Broken"].kind == "exception"


def test_who_extends_a_class_has_to_take_each_parameter_of_its_methods():
    class Generator:
        def __init__(self, client: int, name: str = "a") -> None: ...
        async def agent_loop(self, prompt: str, salt: str | None = None) -> None: ...
        def _own(self) -> None: ...

    found = {o.name: o.default for o in census.methods_of(Generator, "generator")}
    assert found == {
        "generator": None,
        "generator(client)": None,
        "generator(name)": "'a'",
        "generator.agent_loop": None,
        "generator.agent_loop(prompt)": None,
        "generator.agent_loop(salt)": None,
    }


def test_what_a_client_is_beside_its_class():
    class Closing(Batch):
        async def __aenter__(self): ...
        async def __aexit__(self, *_raised): ...

    found = census.of(Closing([]), types={}).offers
    assert [o.name for o in found if o.kind == "protocol"] == [
        "client is AbstractAsyncContextManager",
        "client is Batch",
    ]


class Row(typing.TypedDict):
    tokens: "list[int]"


class Typed:
    async def generate(self) -> Row: ...


def test_a_field_of_a_typed_dictionary_has_the_type_as_it_is_written():
    found = by_name(census.of(Typed(), types={}))["Row.tokens"]
    assert (found.kind, found.form, found.type) == ("field", "required", "list[int]")


def test_two_clients_say_the_same():
    assert census.of(Interface(Client()), types={}) == census.of(Interface(Client()), types={})


def test_no_default_shows_an_address():
    class Odd:
        def call(self, of=object()): ...  # noqa: B008 - the point

    assert by_name(census.of(Odd(), types={}))["call(of)"].default == "<object object>"


def test_configuration_keys_are_those_that_the_code_reads(tmp_path, monkeypatch):
    (tmp_path / "a_stack.py").write_text(
        "def start(cfg):\n    ie_cfg = cfg.generator.inference_engine\n    ie_cfg.more = 1\n    return ie_cfg.rows\n"
        "def other(inference_engine_cfg):\n    return inference_engine_cfg.mode\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert [*census.read_by(["a_stack:start"])] == ["rows"]
    keys = census.keys(Batch, "generator.inference_engine", census.read_by(["a_stack"]))
    assert [(key.name, key.default) for key in keys] == [
        ("generator.inference_engine.rows", None),
        ("generator.inference_engine.mode", "<Mode.KEEP: 'keep'>"),
    ]


def test_keys_outside_the_section_for_engines_are_named_by_their_path(tmp_path, monkeypatch):
    (tmp_path / "its_entry.py").write_text(
        "def start(self, cfg):\n    cfg.generator.inference_engine.rows\n    return self.cfg.trainer.model.rows, cfg.generator.rope\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sections = {"trainer": types.SimpleNamespace(model=Batch([])), "generator": types.SimpleNamespace(rope=1.0)}
    found = census.others(types.SimpleNamespace(**sections), ["its_entry"])
    assert [key.name for key in found] == ["generator.rope", "trainer.model.rows"], "sections are no keys"


def test_environment_variables_are_those_that_the_package_reads(tmp_path, monkeypatch):
    (tmp_path / "settings_of_all.py").write_text(
        "import os\nLIMIT = int(os.environ.get('A_LIMIT', 5))\nUNUSED = os.getenv('B_UNUSED')\n"
        "_FLAG = os.environ.get('_C_FLAG', '1') in ('1',)\n"
    )
    package = tmp_path / "a_package" / "below"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "module.py").write_text(
        "import os\nimport settings_of_all\nfrom settings_of_all import LIMIT\nos.environ['D_WRITTEN'] = str(LIMIT)\n"
        "if settings_of_all._FLAG:\n    print(os.environ['E_READ'], os.environ[LIMIT])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = [*census.variables("a_package", "settings_of_all")]
    assert [(o.name, o.kind, o.default) for o in found] == [
        ("A_LIMIT", "variable", "5"),
        ("E_READ", "variable", None),
        ("_C_FLAG", "variable", "'1'"),
    ]
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        [*census.variables("no_such_package", "settings_of_all")]


def test_switches_are_the_variables_that_stand_for_yes_or_no(tmp_path, monkeypatch):
    (tmp_path / "switches_of_all.py").write_text(
        "import os\nLIMIT = int(os.environ.get('A_LIMIT', 5))\n_NEW = str(os.environ.get('_NEW', '1')).lower() in ('1', 'yes')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert [(o.name, o.kind, o.default) for o in census.switches("switches_of_all")] == [("_NEW", "switch", "'1'")]


def test_what_a_generator_asks_of_its_client(tmp_path, monkeypatch):
    (tmp_path / "its_generator.py").write_text(
        "class G:\n    def go(self):\n        self.client.generate(1, model=2)\n        print(self.client.name, self.other.size)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = {o.name: o for o in census.asked_of("self.client", ["its_generator"], "generator")}
    asked = ["generate", "generate(model)", "name"]
    assert [*found] == [f"generator asks for {name}" for name in asked]
    fewer = {name: o for name, o in found.items() if "model" not in name}
    more = compare(fewer, found, [])
    assert [(change.name, change.how) for change in more.unexplained] == [
        ("generator asks for generate(model)", How.REQUIRED)
    ]
    assert not compare(found, fewer, []).changes, "who asks for less takes every client"
    assert not compare({}, found, []).changes, "an earlier harness told no needs"


def test_what_users_import_is_named_by_its_module(tmp_path, monkeypatch):
    package = tmp_path / "a_stack" / "clients"
    package.mkdir(parents=True)
    (tmp_path / "a_stack" / "__init__.py").write_text("")
    (package / "__init__.py").write_text(
        "import json\nfrom typing import Any\nfrom a_stack.clients.base import Client, hidden\n__all__ = ['Any', 'Client']\n"
    )
    (package / "_private.py").write_text("def helper(): ...\n")
    (package / "base.py").write_text(
        "LIMIT = 1\nclass Client: ...\nclass _Own: ...\nasync def ask(text, /, model, *more, template=None, **options): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = [*census.imports(["a_stack.clients", "a_stack.no_such_package"])]
    assert [(o.name.removeprefix("a_stack.clients"), o.kind, o.form, o.default) for o in found] == [
        (":Client", "import", "handed on", None),
        (".base:Client", "import", "class", None),
        (".base:ask", "import", "async", None),
        (".base:ask(text)", "parameter", "", None),
        (".base:ask(model)", "parameter", "", None),
        (".base:ask(template)", "parameter", "", "None"),
        (".base:ask(*more)", "parameter", "", None),
        (".base:ask(**options)", "parameter", "", None),
    ]


def test_what_a_module_no_longer_gives_or_takes_is_a_change():
    ours = {o.name: o for o in (imported("ask"), imported("Client"), argument("ask", "template"))}
    theirs = {o.name: o for o in (imported("ask"), argument("ask", "text"), argument("new", "text"), imported("new"))}
    assert {change.name: change.how for change in compare(ours, theirs, []).unexplained} == {
        "a_stack.base:Client": How.GONE,
        "a_stack.base:ask(template)": How.GONE,
        "a_stack.base:ask(text)": How.REQUIRED,
    }
    moved = entry(How.RENAMED, "a_stack.base:Client", to="a_stack.base:new")
    assert [(change.name, change.how) for change in compare(ours, theirs, [moved]).changes if change.do] == [
        ("a_stack.base:Client", How.RENAMED)
    ]
    gone = entry(How.GONE, "a_stack.base:Client")
    assert not compare({}, {}, [gone]).stale, "an earlier harness told no imports"


def imported(name: str) -> Offer:
    return Offer(name=f"a_stack.base:{name}", kind="import", form="class")


def argument(function: str, name: str) -> Offer:
    return Offer(name=f"a_stack.base:{function}({name})", kind="parameter")


def test_a_reader_that_is_gone_has_a_name():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        [*census.read_by(["no_such_module"])]


def test_options_name_the_value_of_each_engine_that_differs():
    found = census.options(
        [{"engine.seed": "7", "engine.dtype": "'half'"}, {"engine.seed": "8", "engine.dtype": "'half'"}]
    )
    assert [(o.name, o.kind, o.default) for o in found] == [
        ("engine.dtype", "option", "'half'"),
        ("engine.seed", "option", "7, 8"),
    ]


# --- comparing


CORRECT = by_name(census.of(Interface(Client()), types={}))


def test_a_client_compared_with_itself_is_all_the_same():
    found = compare(CORRECT, CORRECT, [])
    assert (found.same, found.changes, found.stale) == (len(CORRECT), [], [])


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        (interface.MethodGone, [("dp_size", How.GONE)]),
        (interface.AsyncInsteadOfSync, [("tp_size", How.FORM)]),
        (interface.ParameterGone, [("init_weight_update_communicator(init_info)", How.GONE)]),
        (
            interface.ParameterRenamed,
            [("chat_completion(request_payload)", How.GONE), ("chat_completion(payload)", How.REQUIRED)],
        ),
        (
            interface.OneMoreArgument,
            [("pause_generation(mode)", How.DEFAULT), ("pause_generation(clear_cache)", How.DEFAULT)],
        ),
        (
            interface.OtherDefault,
            [
                ("sample(session_id)", How.DEFAULT),
                ("sample(lora_adapter)", How.GONE),
                ("sample(prompt_logprobs)", How.GONE),
                ("sample(topk_prompt_logprobs)", How.GONE),
                ("sample(image)", How.GONE),
            ],
        ),
    ],
)
def test_each_seeded_fault_is_its_own_change_and_no_other(broken, changes):
    found = compare(CORRECT, by_name(census.of(broken(Client()), types={})), [])
    assert [(change.name, change.how) for change in found.unexplained] == changes


def entry(how, *names, **more):
    return Entry(pair="a~b", how=how, names=list(names), do="Change it", source=RELEASED, **more)


def offers(*names, **about):
    return {name: Offer(name=name, kind="method", form="async", **about) for name in names}


def test_an_entry_explains_its_change_and_only_as_what_it_is():
    gone = compare(offers("pause", "stay"), offers("stay"), [entry(How.GONE, "pause")])
    assert (gone.same, gone.unexplained, [change.do for change in gone.changes]) == (1, [], ["Change it"])
    other = compare(offers("pause"), {}, [entry(How.DEFAULT, "pause")])
    assert [change.name for change in other.unexplained] == ["pause"]
    assert other.stale == ["pause"]


def test_an_option_with_another_value_is_a_change_and_one_that_another_vllm_lacks_is_none():
    ours = {
        o.name: o
        for o in census.options([{"engine.seed": "7", "engine.old": "1"}, {"engine.seed": "8", "engine.old": "1"}])
    }
    theirs = {o.name: o for o in census.options([{"engine.seed": "7"}, {"engine.seed": "7"}])}
    found = compare(ours, theirs, [])
    assert [(change.name, change.how, change.baseline, change.candidate) for change in found.unexplained] == [
        ("engine.seed", How.DEFAULT, "engine.seed = 7, 8", "engine.seed = 7")
    ]
    seeds = entry(How.DEFAULT, "engine.seed")
    assert compare(theirs, theirs, [seeds]).stale == ["engine.seed"]
    rope = entry(How.GONE, "generator.rope_scaling", "generator.inference_engine.backend", "A_LIMIT")
    assert compare({}, {}, [seeds, rope]).stale == ["generator.inference_engine.backend"], (
        "an earlier harness told neither options nor variables"
    )


def test_a_renamed_method_keeps_its_arguments_under_the_new_name():
    argument = {"pause(mode)": Offer(name="pause(mode)", kind="parameter", default="'keep'")}
    there = {"hold(mode)": Offer(name="hold(mode)", kind="parameter", default="'abort'")}
    argument |= {"pause(label)": Offer(name="pause(label)", kind="parameter")}
    there |= {"hold(label)": Offer(name="hold(label)", kind="parameter")}
    renamed = entry(How.RENAMED, "pause", to="hold")
    found = compare(offers("pause") | argument, offers("hold") | there, [renamed])
    assert [(change.name, change.how) for change in found.changes] == [
        ("pause", How.RENAMED),
        ("pause(mode)", How.DEFAULT),
    ]


def test_a_new_name_that_is_not_there_either_leaves_the_old_one_gone():
    found = compare(offers("pause"), {}, [entry(How.RENAMED, "pause", to="hold")])
    assert [(change.name, change.how) for change in found.unexplained] == [("pause", How.GONE)]


def test_another_meaning_needs_its_entry_and_both_names():
    said = entry(How.MEANING, "pause", scenario="x")
    assert [change.how for change in compare(offers("pause"), offers("pause"), [said]).changes] == [How.MEANING]
    assert compare(offers("pause"), {}, [said]).stale == ["pause"]


def test_another_result_type_is_a_change():
    found = compare(offers("pause", type="None"), offers("pause", type="dict"), [])
    assert [change.how for change in found.changes] == [How.TYPE]


def test_arguments_of_a_method_that_is_gone_are_not_named_again():
    argument = {"pause(mode)": Offer(name="pause(mode)", kind="parameter")}
    assert [change.name for change in compare(offers("pause") | argument, {}, []).changes] == ["pause"]


# --- verdicts


def with_census(kind, target, status="pass", **about):
    call = traces.call("census", {}, msgspec.to_builtins(CensusResult(offers=list(kind.values()))))
    return parity.side(traces.trace(call, target=target, **about), status)


def verdict_of(theirs, status="pass"):
    left, right = with_census(CORRECT, "stack:old"), with_census(theirs, "stack:new", status)
    return next(v for v in side_by_side(parity.SCENARIO, left, right, None, noise_floors([])) if v.check == CENSUS)


@pytest.mark.parametrize("status", ["pass", "fail"])
def test_what_is_gone_without_an_entry_is_red_whatever_the_checks_say(status):
    found = verdict_of({name: offer for name, offer in CORRECT.items() if name != "teardown"}, status)
    assert found.red
    assert (found.status, found.reason) == ("regression", "gone and without an entry: teardown")
    assert [(change.name, change.do) for change in found.changes] == [("teardown", "")]


def test_what_several_scenarios_look_up_is_told_once():
    found = verdict_of({name: offer for name, offer in CORRECT.items() if name != "teardown"})
    made = Judgement(run=recordings.info(), verdicts=[found, msgspec.structs.replace(found, scenario="census.another")])
    assert [change.name for _, change in view.changes(made)] == ["teardown"]
    same = f"{len(CORRECT) - 1} the same"
    assert view.changed(made) == [f"Client, what a caller meets: {same}, 1 gone; 1 without an entry"]


def test_what_the_candidate_alone_offers_is_listed_and_asks_nothing():
    ours = CORRECT | offers("pause")
    more = {"pause(mode)": Offer(name="pause(mode)", kind="parameter", default="'keep'")}
    more |= {"fly(high)": Offer(name="fly(high)", kind="parameter")} | offers("fly")
    more |= {
        o.name: o for o in (*census.options([{"engine.new": "1"}]), Offer(name="A_LIMIT", kind="variable", default="5"))
    }
    found = compare(ours, ours | more, [])
    assert (found.same, found.changes) == (len(ours), [])
    assert [(change.name, change.how, change.bare) for change in found.new] == [
        (name, How.NEW, False) for name in ("pause(mode)", "fly", "A_LIMIT")
    ], "no arguments of a new method, and no option"
    verdict = verdict_of(CORRECT | more)
    assert (verdict.status, verdict.red, [change.name for change in verdict.changes]) == (
        "parity",
        False,
        ["fly", "A_LIMIT"],
    )


@pytest.mark.parametrize(
    ("said", "runs_on", "status"),
    [("", "cpu", "open"), ("cpu", "cpu", "open"), ("cuda", "cpu", "regression"), ("cpu", "cuda", "regression")],
)
def test_an_entry_of_one_kind_of_engine_explains_no_change_on_the_other(monkeypatch, said, runs_on, status):
    monkeypatch.setattr("harness.judging.census.shipped", lambda: [of_engine(said)])
    assert between({"engine.seed": "7"}, {"engine.seed": "8"}, runs_on).status == status


@pytest.mark.parametrize(
    ("said", "runs_on", "reason"),
    [
        ("", "cuda", "an entry explains what is not there: engine.seed"),
        ("cuda", "cuda", "an entry explains what is not there: engine.seed"),
        ("cpu", "cuda", ""),
    ],
)
def test_an_entry_of_one_kind_of_engine_is_stale_on_no_other(monkeypatch, said, runs_on, reason):
    monkeypatch.setattr("harness.judging.census.shipped", lambda: [of_engine(said)])
    assert between({"engine.seed": "7"}, {"engine.seed": "7"}, runs_on).reason == reason


def of_engine(kind):
    change = entry(How.DEFAULT, "engine.seed", engine=kind)
    return msgspec.structs.replace(change, pair="stack:old~stack:new")


def between(ours, theirs, engine):
    """The verdict on stacks whose engines run with these options, on this kind of engine."""
    kinds = [{o.name: o for o in census.options([options])} for options in (ours, theirs)]
    sides = [
        with_census(kind, target, engine=engine) for kind, target in zip(kinds, ("stack:old", "stack:new"), strict=True)
    ]
    return next(v for v in side_by_side(parity.SCENARIO, *sides, None, noise_floors([])) if v.check == CENSUS)


def test_the_same_client_is_parity():
    found = verdict_of(CORRECT)
    assert (found.status, found.facts, found.changes) == ("parity", len(CORRECT), [])


# --- the shipped entries


def test_every_entry_names_a_scenario_that_exists_and_a_line_of_the_release():
    assert {entry.scenario for entry in shipped() if entry.scenario} <= {*catalogue.declared()}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('how = "gone"\nsource = "no line"', "no file and line"),
        (f'how = "renamed"\nsource = "{RELEASED}"', "`to` is for one renamed name"),
        (f'how = "other meaning"\nsource = "{RELEASED}"', "no scenario"),
        (f'how = "lost"\nsource = "{RELEASED}"', "Invalid enum value"),
    ],
)
def test_a_malformed_entry_is_refused_by_name(tmp_path, line, said):
    file = tmp_path / "changes.toml"
    file.write_text(f'[[change]]\npair = "a~b"\nnames = ["x"]\ndo = "Change it"\n{line}\n')
    with pytest.raises(UsageError, match=said):
        load(file)


def test_a_name_has_one_entry(tmp_path):
    file = tmp_path / "changes.toml"
    one = f'[[change]]\npair = "a~b"\nhow = "gone"\nnames = ["x"]\ndo = "Change it"\nsource = "{RELEASED}"\n'
    file.write_text(one + one)
    with pytest.raises(UsageError, match="x of a~b twice"):
        load(file)


def test_a_trace_without_a_census_has_none():
    assert offered(parity.side(traces.trace()).evidence.trace) is None


def test_what_a_client_offers_and_nobody_calls_is_told_with_arguments_that_nobody_gives():
    names = [
        "sleep",
        "sleep(level)",
        "sleep(tags)",
        "sleep(**more)",
        "fly",
        "fly(high)",
        "generator",
        "generator.loop",
        "client",
        "client(url)",
    ]
    kinds = {True: "parameter", False: "method"}
    offers = [Offer(name=name, kind=kinds["(" in name]) for name in names]
    slept = [Raw(method=method, arguments=["level"], forms={}) for method in ("sleep", "_ask")]
    asked = msgspec.structs.replace(traces.call("sleep"), raw=slept)
    trace = traces.trace(traces.call("census", None, CensusResult(offers=offers)), asked)
    assert callable_names(trace) == {"sleep", "sleep(level)", "sleep(tags)", "fly", "fly(high)"}
    assert never_called(callable_names(trace), called_names(trace)) == ["fly", "sleep(tags)"]
