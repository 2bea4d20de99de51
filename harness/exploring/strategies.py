"""How workloads are drawn: Hypothesis strategies that know what the contract allows.

Imported where something is explored, and nowhere else: Hypothesis comes with the extra "explore".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar, get_args

from hypothesis import strategies as st

from harness.contract.capability import Capability
from harness.contract.messages import PauseMode, SessionId
from harness.exploring import workloads as w
from harness.exploring.scripts import QUANTIZED

LONGEST = 6
"""Operations of each half of a workload, at most. Hypothesis draws about half as many."""
SESSIONS: tuple[SessionId, ...] = ("a", "b", "c", 7, "7", 0, "", -1, "two words", "Gespräch")

PLAINEST = w.Generate(w.Rows(1), w.answer(4))
"""What a workload without operations does instead."""

T = TypeVar("T")


def _one_of(*each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(*each)


def _few(most: int, least: int = 1) -> st.SearchStrategy[int]:
    return st.integers(least, most)


def _several(names: Collection[T], *, least: int = 1, most: int = 3) -> st.SearchStrategy[tuple[T, ...]]:
    """Some of these, each once."""
    return st.lists(st.sampled_from(list(names)), min_size=least, max_size=most, unique=True).map(tuple)


def _seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 50)


SEEDED = (("temperature", "1.0"), ("ignore_eos", "True"))


def samplings() -> st.SearchStrategy[w.Sampling]:
    """Sampling parameters of generate(): greedy, by chance, and every way in which an answer may end."""
    most = st.sampled_from([4, 12, 1, 24])
    greedy = st.builds(lambda n, logprobs: w.answer(n, logprobs=logprobs), most, st.booleans())
    seeded = st.builds(
        lambda n, seed: (("max_tokens", str(n)), *SEEDED, ("seed", str(seed)), ("logprobs", "0")), most, _seeds()
    )
    by_chance = st.builds(lambda n: (("max_tokens", str(n)), *SEEDED), most)
    stop_tokens = st.builds(
        lambda least: (
            ("max_tokens", "24"),
            ("temperature", "0.0"),
            ("stop_token_ids", "stack.vocabulary.scattered(range(100, 300))"),
            *((("min_tokens", str(least)),) if least else ()),
        ),
        st.sampled_from([0, 4, 16]),
    )
    return _one_of(greedy, seeded, by_chance, stop_tokens, _ends(), *often(_strings(), 2), _special())


def _ends() -> st.SearchStrategy[w.Sampling]:
    """The end-of-sequence token, heeded or ignored."""
    few = ("allowed_token_ids", "[stack.vocabulary.eos, *stack.vocabulary.plain[:6]]")
    return st.builds(
        lambda seed, ignored: (
            ("max_tokens", "20"), ("temperature", "1.0"), ("seed", str(seed)), few, ("ignore_eos", str(ignored)),
        ),
        _seeds(),
        st.booleans(),
    )  # fmt: skip


def _strings() -> st.SearchStrategy[w.Sampling]:
    """A stop string, left out of the text or included."""
    two = ("allowed_token_ids", "stack.vocabulary.plain[:2]")
    joined = ("stop", "[stack.vocabulary.text(stack.vocabulary.plain[:2])]")
    return st.builds(
        lambda seed, included: (
            ("max_tokens", "24"), ("temperature", "1.0"), ("seed", str(seed)), two,
            joined, *((("include_stop_str_in_output", "True"),) if included else ()),
        ),
        _seeds(),
        st.booleans(),
    )  # fmt: skip


def _special() -> st.SearchStrategy[w.Sampling]:
    """Special tokens within the answer, skipped in its text or kept."""
    some = ("allowed_token_ids", "[*stack.vocabulary.some_special(3), *stack.vocabulary.plain[:9]]")
    return st.builds(
        lambda seed, kept: (
            ("max_tokens", "16"), *SEEDED, ("seed", str(seed)), some,
            *((("skip_special_tokens", "False"),) if kept else ()),
        ),
        _seeds(),
        st.booleans(),
    )  # fmt: skip


def rows() -> st.SearchStrategy[w.Rows]:
    return st.builds(
        w.Rows, st.sampled_from([1, 2, 5, 9, 20]), st.sampled_from(["unique", "ragged", "long", "broken_off"])
    ).map(lambda one: w.Rows(min(one.count, 4), "long") if one.kind == "long" else one)


def sessions() -> st.SearchStrategy[tuple[SessionId, ...]]:
    return st.one_of(
        st.just(()), st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=3, unique_by=repr).map(tuple)
    )


def _session() -> st.SearchStrategy[SessionId | None]:
    return st.one_of(st.none(), st.sampled_from(SESSIONS))


FILTERS: tuple[w.Sampling, ...] = (
    (("temperature", "1.0"), ("top_k", "5")),
    (("temperature", "1.0"), ("top_p", "0.5")),
    (("temperature", "1.0"), ("min_p", "0.2")),
    (("temperature", "0.7"), ("top_k", "8"), ("top_p", "0.8")),
)


def _allowed(names: Collection[T], needed: dict[T, frozenset[Capability]], able: Collection[Capability]) -> list[T]:
    return [name for name in names if needed[name] <= frozenset(able)]


def often(strategy: st.SearchStrategy[Any], times: int) -> list[st.SearchStrategy[Any]]:
    """As many times as likely as another."""
    return [strategy] * times


def operations(able: Collection[Capability], topology: str = "disaggregated") -> st.SearchStrategy[w.Operation]:
    """One operation that a stack of these capabilities may be asked for, the plainest first."""
    found: list[st.SearchStrategy[Any]] = [
        *often(st.builds(w.Generate, rows(), samplings(), sessions()), 3),
        *often(_asks(able), 3),
        st.builds(w.Conversation, _few(4, 2), st.booleans()),
        st.builds(w.Repeated, st.sampled_from([2, 4]), _seeds(), st.sampled_from([0, 3])),
        st.builds(w.Copies, st.sampled_from([2, 8])),
        st.builds(w.Filtered, st.sampled_from(FILTERS), _seeds()),
        st.builds(w.Concurrent, st.sampled_from([2, 8]), _few(3)),
        st.builds(w.Crowd, st.booleans(), st.booleans(), st.booleans()),
        st.builds(w.Refused, _several([name for name, one in w.MISTAKES.items() if one.needs <= set(able)], most=4)),
        st.just(w.Nothing()),
        st.builds(w.Draws, st.sampled_from([1.0, 0.7])),
        *often(_in_flight(able), 2),
    ]
    found += [strategy for needed, strategy in _optional(able) if needed <= set(able)]
    if topology == "colocated" and {Capability.SLEEP, Capability.WEIGHT_SYNC} <= set(able):
        tags = st.booleans() if Capability.WAKE_UP_TAGS in able else st.just(False)
        found.append(st.builds(w.Sleep, st.sampled_from([1, 2]), _few(3, 0), tags))
    return _one_of(*found)


def _optional(able: Collection[Capability]) -> list[tuple[set[Capability], st.SearchStrategy[Any]]]:
    """What it takes → operations that a stack may lack."""
    has = Capability
    greedy, sampled = st.just(w.answer(8)), st.just((("max_tokens", "12"), ("temperature", "1.0"), ("seed", "3")))
    asked = _few(4, 1)
    looks: list[w.Question] = [q for q, needed in w.NEEDED.items() if needed is None or needed in able]
    return [
        ({has.GENERATE_MESSAGES}, st.builds(w.Messages, asked, greedy)),
        ({has.SAMPLE}, st.builds(w.Sample, _few(4), st.one_of(st.none(), _seeds()), st.booleans(), _session())),
        ({has.COMPLETION}, st.builds(w.Completion, _few(5, 0), st.booleans(), st.one_of(greedy, sampled), _session())),
        ({has.CHAT_COMPLETION}, st.builds(w.Chat, _few(3), st.one_of(greedy, sampled), _session())),
        ({has.TOKENIZE}, st.one_of(st.builds(w.Texts, _few(3), st.booleans()), st.builds(w.ReadBack, _few(3)))),
        (set(), st.builds(w.Look, _several(looks), _few(3))),
        *(({has.PAUSE_KEEP}, paused) for paused in often(_paused(able), 4)),
        ({has.PAUSE_KEEP}, _idle(able)),
        ({has.PAUSE_KEEP, has.IS_PAUSED}, st.builds(w.States, st.booleans())),
        ({has.RESET_PREFIX_CACHE}, st.builds(w.Reset, _flag(has.RESET_RUNNING_REQUESTS, able))),
        *(({has.WEIGHT_SYNC}, sync) for sync in often(_syncs(), 2)),
        ({*w.ADAPTERS}, st.builds(w.Load, st.sampled_from(["one", "other"]), _few(3))),
        ({*w.ADAPTERS, has.UNLOAD_ADAPTER}, st.builds(w.Unload, st.sampled_from(["one", "other"]))),
    ]


def _syncs() -> st.SearchStrategy[w.Sync]:
    batch: st.SearchStrategy[w.Batch | None] = st.sampled_from([None, "short", "long"])
    return st.builds(w.Sync, _few(3, 0), st.sampled_from([1, 4]), batch)


def _flag(needed: Capability, able: Collection[Capability]) -> st.SearchStrategy[bool]:
    return st.booleans() if needed in able else st.just(False)


def _asks(able: Collection[Capability]) -> st.SearchStrategy[w.Ask]:
    under: st.SearchStrategy[w.Under] = st.just(w.Under())
    if set(able) >= w.ADAPTERS:
        loaded = st.builds(w.Under, st.sampled_from(["one", "one", "other"]), _few(2, 0))
        under = st.one_of(under, loaded)
    batch = st.sampled_from([*w.BATCHES, "long"])
    return st.builds(w.Ask, batch, st.lists(under, min_size=1, max_size=4).map(tuple))


def _modes(able: Collection[Capability]) -> st.SearchStrategy[PauseMode]:
    return st.sampled_from([mode for mode in get_args(PauseMode) if Capability(f"pause_{mode}") in able])


def _during(able: Collection[Capability], least: int) -> st.SearchStrategy[tuple[w.During, ...]]:
    names = _allowed(get_args(w.During), w.NEEDED_DURING, able)
    return _several(names, least=least)


def _paused(able: Collection[Capability]) -> st.SearchStrategy[w.Paused]:
    clear = _flag(Capability.PAUSE_CLEAR_CACHE, able)
    return st.builds(
        w.Paused,
        _modes(able),
        _few(5, 2),
        _during(able, 0),
        clear,
        _few(2),
        st.booleans(),
        _few(3),
        st.sampled_from([1, 4]),
    )


def _idle(able: Collection[Capability]) -> st.SearchStrategy[w.IdlePause]:
    return st.builds(w.IdlePause, _modes(able), _during(able, 1), _few(3), st.sampled_from([1, 4]))


def _in_flight(able: Collection[Capability]) -> st.SearchStrategy[w.InFlight]:
    names = _allowed(get_args(w.Meanwhile), w.NEEDED_MEANWHILE, able)
    return st.builds(w.InFlight, st.sampled_from([2, 8, 24]), _several(names))


@st.composite
def workloads(draw: st.DrawFn, capabilities: Collection[Capability], longest: int = LONGEST) -> w.Workload:
    """Sequences of operations that the contract allows on a stack of these capabilities, in any topology.

    Each half of a sequence has `longest` operations at most.
    One in five ends with the death of all servers, one in four runs on quantized engines, where there is either.
    """
    able = sorted(capabilities)
    topology = draw(st.sampled_from(["disaggregated", "disaggregated", "colocated"]))
    quantized = set(able) >= QUANTIZED and draw(st.sampled_from([False, False, False, True]))
    topology = "int8" if quantized else topology
    one = operations(able, topology)
    done = [*draw(st.lists(one, max_size=longest)), *draw(st.lists(one, max_size=longest))] or [PLAINEST]
    if {Capability.KILL_SERVER, Capability.HEALTH} <= set(able) and draw(st.sampled_from([False] * 4 + [True])):
        done.append(w.Deaths(draw(_few(6, 4))))
    return w.Workload(tuple(done), topology)
