"""Which requests share a server. Compared as a partition: two right hash functions may number the servers differently."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from harness.checks.base import Check, Evidence, Finding, Tap, concluded, failed, passed, together, untestable
from harness.checks.matching import Row, assignment, queries
from harness.contract.errors import Blame
from harness.contract.faults import Fact
from harness.contract.messages import SessionId
from harness.records.verdict import Margin

ALPHA = 1e-6
"""A spread is judged only if the probability that a fair choice leaves out a server is at most this."""

SKEW = 1.25
"""In the long run a right spread gives a server at most this many times its fair share, and a busy one at least as much less: no hash
is quite even."""

MOST_OF_ALL = 0.9
"""A server's share under the fault that `power` tells of."""

UNNOTICED = 1e-3
"""Sessions are judged only if a router that ignores them keeps all their turns together with at most this probability."""

UNSEEN = "no engine execution could be matched with a request, so its server is unknown"


def family(session: SessionId) -> str:
    """The kind of session id, in words for a reason, which blames the kind and not one id."""
    kinds: tuple[tuple[bool, str], ...]
    if isinstance(session, int):
        kinds = (
            (session == 0, "the integer 0"),
            (session < 0, "a negative integer"),
            (session >= 2**53, "a large integer"),
        )
        return next((words for applies, words in kinds if applies), "an integer")
    kinds = (
        (session == "", "the empty string"),
        (not session.isascii(), "a text beyond ASCII"),
        (" " in session, "a text with spaces"),
        (len(session) > 256, "a long text"),
        (session.lstrip("-").isdigit(), "a text of digits"),
    )
    return next((words for applies, words in kinds if applies), "a plain text")


def _placed(evidence: Evidence) -> Iterator[tuple[Row, tuple[str, ...]]]:
    """Rows with the servers that worked on them."""
    found = assignment(evidence)
    for row in found.rows:
        servers = tuple(dict.fromkeys(execution.server for execution in found.where(row)))
        if servers:
            yield row, servers


def _askers(evidence: Evidence) -> dict[Any, set[SessionId | None]]:
    """(prompt, answer) → the sessions that asked and were answered so. With several of them nobody can tell which execution was
    whose."""
    found: dict[Any, set[SessionId | None]] = defaultdict(set)
    for row in assignment(evidence).rows:
        found[row.prompt, row.tokens].add(row.session)
    return found


def _judge_sticky(evidence: Evidence) -> Finding:
    sessions: dict[tuple[str, SessionId], list[tuple[Row, tuple[str, ...]]]] = defaultdict(list)
    askers = _askers(evidence)
    for row, servers in _placed(evidence):
        if row.session is not None and len(askers[row.prompt, row.tokens]) == 1:
            sessions[type(row.session).__name__, row.session].append((row, servers))
    turns = {session: places for session, places in sessions.items() if len(places) > 1}
    if not turns:
        return untestable(UNSEEN)
    choices = sum(len(places) - 1 for places in turns.values())
    wrong = [
        (f"a session moved between servers: its id is {family(session)}", {"session": session, "turns": _turns(places)})
        for (_, session), places in turns.items()
        if len({s for _, at in places for s in at}) > 1
    ]
    return concluded(len(turns), wrong) if wrong else _told(evidence, len(turns), choices)


def _told(evidence: Evidence, facts: int, choices: int) -> Finding:
    """A pass, unless a router that ignores the sessions could have made the same `choices` of a server by chance."""
    servers = len(evidence.header.servers)
    if servers < 2:
        return untestable("there is one server: no session can leave it", Blame.SETUP)
    if servers**-choices > UNNOTICED:
        return untestable("too few turns: a router that ignores sessions could have kept them together by chance")
    return passed(facts, choices=choices, unnoticed=servers**-choices)


def _turns(places: list[tuple[Row, tuple[str, ...]]]) -> list[dict[str, Any]]:
    """The first turn and the first on another server: the smallest proof."""
    first = places[0]
    other = next(place for place in places if place[1] != first[1] or len(place[1]) > 1)
    return [{**row.shown, "servers": list(servers)} for row, servers in (first, other)]


STICKY = Check(
    name="sticky_sessions",
    fault="a session moves to another server on a later turn, and its KV cache is lost",
    next_step="look at how the session id travels and what picks the server: the evidence has the session and the servers that ran it",
    reads=Fact.ROUTES,
    source='SkyRL #899, "Session-aware hashing: Sticky routing for multi-turn conversations"; SkyRL #934',
    tap=Tap.READ,
    judge=_judge_sticky,
    queries=queries,
)


def _judge_alias(evidence: Evidence) -> Finding:
    groups: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row, servers in _placed(evidence):
        if row.session is not None:
            groups[str(row.session)][type(row.session).__name__].update(servers)
    both = {name: kinds for name, kinds in groups.items() if len(kinds) > 1}
    if not both:
        return untestable(UNSEEN)
    parted = [name for name, kinds in both.items() if len(set().union(*kinds.values())) > 1]
    if parted:
        shown = [
            {"session": name, "servers": {kind: sorted(at) for kind, at in both[name].items()}}
            for name in sorted(parted)
        ]
        return failed(len(both), "an integer session id and its text are not the same session", shown)
    return _told(evidence, len(both), len(both))


SAME_SESSION = Check(
    name="integer_is_its_text",
    fault='the session ids 7 and "7", which the type allows side by side, are routed as two sessions',
    next_step="look at where the session id becomes text: on one path it does not",
    reads=Fact.ROUTES,
    source="SkyRL #899, review of the session id: hash_with_sha256(str(session_id))",
    tap=Tap.READ,
    judge=_judge_alias,
    queries=queries,
)


def false_alarm_rate(units: int, servers: int) -> float:
    """Upper bound on the probability that a fair choice of one of `servers` for each of `units` leaves out any server."""
    return min(1.0, servers * (1 - 1 / servers) ** units)


def shares(units: int, servers: int) -> tuple[int, int]:
    """The fewest and the most units that a server may get. A choice within `SKEW` is outside with probability `ALPHA` at most."""
    from scipy import stats  # type: ignore[import-untyped]  # slow to import, and scipy ships no types

    tail = ALPHA / (2 * servers)
    fewest = stats.binom.ppf(tail, units, (2 - SKEW) / servers)
    return int(fewest), int(stats.binom.isf(tail, units, min(1.0, SKEW / servers)))


def power(units: int, servers: int) -> float:
    """Probability that a server with `MOST_OF_ALL` of the units is noticed."""
    from scipy import stats

    return float(stats.binom.sf(shares(units, servers)[1], units, MOST_OF_ALL))


def _spread(evidence: Evidence, units: Iterable[set[str]], what: str) -> Finding:
    """Judges if every server is used by some unit, and if their shares are even. A unit is routed as one: a session, a request, a call
    of sample(). One that ran on several servers counts for each of them in part: that it moved is another check's."""
    placed = [unit for unit in units if unit]
    if not placed:
        return untestable(UNSEEN)
    everyone = set(evidence.header.servers)
    if len(everyone) < 2:
        return untestable("there is one server: nothing can be spread", Blame.SETUP)
    rate = false_alarm_rate(len(placed), len(everyone))
    if rate > ALPHA:
        return untestable("too few requests to tell a fair spread from an unfair one")
    counts = {server: sum(1 / len(unit) for unit in placed if server in unit) for server in sorted(everyone)}
    most_used, least_used = max(counts.values()), min(counts.values())
    fewest, most = shares(len(placed), len(everyone))
    numbers = {"false_alarm_rate": rate + ALPHA, "largest_share": most_used / len(placed)}
    if not least_used or least_used < fewest or most_used > most:
        reason = f"{what} leave a server without any" if not least_used else f"{what} are spread in uneven shares"
        shown = {"requests by server": counts, "fewest": fewest, "most": most}
        return failed(len(placed), reason, [shown], **numbers)
    margin = Margin(
        unit="share of the requests at one server",
        measured=most_used / len(placed),
        bound=min(most, len(placed) - 1) / len(placed),
        faults={"one server gets everything": 1.0},
        false_alarm_rate=rate + ALPHA,
        power=1.0,
    )
    numbers["power_if_one_gets_most"] = power(len(placed), len(everyone))
    return passed(len(placed), margin=margin, **numbers)


def _judge_sessions_spread(evidence: Evidence) -> Finding:
    """Judges the sessions of each method by themselves: each has a way to its servers of its own."""
    methods: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row, servers in _placed(evidence):
        if row.session is not None:
            methods[row.call.method][str(row.session)].update(servers)
    spreads = [_spread(evidence, sessions.values(), f"sessions of {method}()") for method, sessions in methods.items()]
    return together(spreads) if spreads else untestable(UNSEEN)


SESSIONS_SPREAD = Check(
    name="sessions_spread",
    fault="every session is hashed to the same server",
    next_step="look at the hash that picks a server: the evidence has the sessions of each one",
    reads=Fact.ROUTES,
    source="SkyRL #899, session-aware hashing; SkyRL #934: hash_with_sha256(session_id) % num_engines",
    tap=Tap.READ,
    judge=_judge_sessions_spread,
    queries=queries,
)


def _judge_sessionless_spread(evidence: Evidence) -> Finding:
    """Judges all requests, and those of each prompt with enough of them: a prompt's content must not decide."""
    units: dict[tuple[int, int], set[str]] = defaultdict(set)
    of_prompt: dict[tuple[int, ...] | None, set[tuple[int, int]]] = defaultdict(set)
    for row, servers in _placed(evidence):
        if row.session is None:
            # The samples of one call share a server (SkyRL #934: one engine is selected per call). Those of Tinker's backend are
            # requests of their own.
            asked = row.call.request
            as_one = row.call.method == "sample" and (asked.get("tinker") is None or asked.get("forwarded", False))
            unit = (row.call.id, 0 if as_one else row.index)
            units[unit].update(servers)
            of_prompt[row.prompt].add(unit)
    kind = "identical requests" if len(of_prompt) == 1 else "requests"
    found = _spread(evidence, units.values(), f"{kind} without a session")
    if found.status != "pass":
        return found
    alike = (
        _spread(evidence, [units[unit] for unit in same], "identical requests without a session")
        for same in of_prompt.values()
    )
    return together([found, *(one for one in alike if one.status == "fail")])


SESSIONLESS_SPREAD = Check(
    name="sessionless_spread",
    fault="all requests without a session run on one server, or far more of them than its share",
    next_step="look at what picks a server for a request without a session id: a constant in its place sends all to one",
    reads=Fact.ROUTES,
    source='SkyRL API reference, InferenceEngineClient: "If None, uses random load-balancing"; SkyRL #934',
    tap=Tap.READ,
    judge=_judge_sessionless_spread,
    queries=queries,
)
