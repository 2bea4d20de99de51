"""What a caller has to change when the candidate's client replaces the baseline's. Pure but for `load`.

Each thing that the baseline offers is the same, or a `Change`. A change that no entry of ``scenarios/client_changes.toml`` explains is
red. So is an entry whose change is not there. What the candidate alone offers is listed too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Literal, final

import msgspec

from harness.contract import data
from harness.contract.errors import UsageError
from harness.contract.messages import CensusResult, Offer
from harness.judging.sources import SOURCE, OfPairs
from harness.records.recording import ScenarioTrace
from harness.records.verdict import Change, How

CENSUS = "client.census"
"""Facet of what the two clients offer."""
CONSTRUCTORS = ("client", "generator")
"""Names under which a census has those of the two classes."""
_LATER = {
    "protocol": re.compile(r"client is \w+"),
    "option": re.compile(r"(engine|trainer|generator(?!\.inference_engine))\..+"),
    "variable": re.compile(r"[A-Z][A-Z0-9_]+"),
    "switch": re.compile(r"_?SKYRL_[A-Z0-9_]+"),
    "need": re.compile(r"[\w ]+ asks for .+"),
    "import": re.compile(r"[\w.]+:.+"),
}
"""Kind → names that a census has since it tells that kind."""
Offers = Mapping[str, Offer]
"""Name → what is offered under it."""


@final
class Entry(OfPairs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change that is understood. The file's head explains the fields."""

    how: How
    names: list[str]
    do: str
    to: str = ""
    scenario: str = ""
    engine: Literal["", "cpu", "cuda"] = ""
    """The kind of engine that shows the change; empty: both kinds."""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    change: list[Entry] = []


@final
class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the comparison of two clients found."""

    same: int
    """Number of things that the caller keeps."""
    changes: list[Change]
    new: list[Change]
    """What the candidate alone offers, and nobody has to give."""
    stale: list[str]
    """Names of entries whose change is not there."""

    @property
    def unexplained(self) -> list[Change]:
        return [change for change in self.changes if change.bare]


def load(path: Path | None = None) -> list[Entry]:
    """All entries of a file; None means the one shipped with the scenarios. Raises `UsageError` for a malformed file."""
    listed = data.read(path, "client_changes.toml", _File, holds="changes of a client").change
    found = [one for entry in listed for one in entry.each]
    named = [(entry.pair, name) for entry in found for name in entry.names]
    wrong = [f"{name} of {pair} twice" for pair, name in dict.fromkeys(named) if named.count((pair, name)) > 1]
    wrong += [f"{entry.names}: no file and line in its source" for entry in found if not SOURCE.fullmatch(entry.source)]
    wrong += [f"{entry.names}: `to` is for one renamed name" for entry in found if _misnamed(entry)]
    wrong += [f"{entry.names}: no scenario" for entry in found if (entry.how is How.MEANING) != bool(entry.scenario)]
    if wrong:
        raise UsageError(f"{path or 'client_changes.toml'}: {'; '.join(wrong)}", next_step="see the head of that file")
    return found


def _misnamed(entry: Entry) -> bool:
    return not (len(entry.names) == 1 and entry.to) if entry.how is How.RENAMED else bool(entry.to)


@functools.cache
def shipped() -> list[Entry]:
    """The entries that ship with the scenarios."""
    return load()


def of_pair(pair: str, engine: str) -> list[Entry]:
    """The shipped entries of a pair of stacks that hold for a kind of engine."""
    return [entry for entry in shipped() if entry.pair == pair and entry.engine in ("", engine)]


def offered(trace: ScenarioTrace) -> Offers | None:
    """What the stack's client offers; None without a census."""
    results = [call.result for call in trace.calls if call.method == "census" and call.result is not None]
    found = [offer for result in results for offer in msgspec.convert(result, CensusResult).offers]
    return {offer.name: offer for offer in found} if found else None


def callable_names(trace: ScenarioTrace) -> set[str]:
    """The client's methods and their arguments, as a census names them: "sleep", "sleep(level)"."""
    offers = (offered(trace) or {}).values()
    names = {offer.name for offer in offers if offer.kind == "method"}
    methods = {name for name in names if name not in CONSTRUCTORS and "." not in name}
    return methods | {
        offer.name
        for offer in offers
        if offer.kind == "parameter" and offer.name.partition("(")[0] in methods and "*" not in offer.name
    }


def called_names(trace: ScenarioTrace) -> set[str]:
    """The methods of the client that this recording's calls called, with the arguments that they gave."""
    raws = [raw for call in trace.calls for raw in call.raw or ()]
    return {raw.method for raw in raws} | {f"{raw.method}({name})" for raw in raws for name in raw.arguments}


def never_called(offers: Set[str], called: Set[str]) -> list[str]:
    """Methods that were not called, and arguments that were never given to a method that was."""
    return sorted(name for name in offers - called if (method := name.partition("(")[0]) == name or method in called)


def compare(baseline: Offers, candidate: Offers, entries: Sequence[Entry]) -> Found:
    """`entries`: those of this pair of stacks."""
    by_name = {name: entry for entry in entries for name in entry.names}
    renamed = {name: entry.to for name, entry in by_name.items() if entry.how is How.RENAMED and entry.to in candidate}
    judged = [*_lost(baseline, candidate, renamed, by_name)]
    added = [*_added(baseline, candidate, renamed)]
    changes = [*filter(None, judged), *(change for change in added if change.how is not How.NEW)]
    explained = [_explained(change, by_name.get(change.name)) for change in changes]
    used = {change.name for change in explained if change.do}
    told = {offer.kind for offer in baseline.values()}
    for names in (names for kind, names in _LATER.items() if kind not in told):
        used |= {name for name in by_name if names.fullmatch(name)}  # a recording of an earlier harness
    return Found(
        same=judged.count(None),
        changes=explained,
        new=[change for change in added if change.how is How.NEW],
        stale=[name for name in by_name if name not in used],
    )


def _explained(change: Change, entry: Entry | None) -> Change:
    if entry is None or entry.how is not change.how:
        return change
    return msgspec.structs.replace(change, do=entry.do, source=entry.source)


def _lost(
    baseline: Offers, candidate: Offers, renamed: Mapping[str, str], entries: Mapping[str, Entry]
) -> Iterator[Change | None]:
    """One per thing that the baseline offers; None if it is the same. Arguments of a method that is gone are left out."""
    for name, ours in baseline.items():
        owner = name.partition("(")[0]
        theirs = candidate.get(_at(name, renamed))
        if theirs is None and ours.kind in ("option", "need"):
            continue  # an option is of vLLM's release, not of the stack; who needs less takes every client
        if theirs is None and owner != name and renamed.get(owner, owner) not in candidate:
            continue
        how = How.RENAMED if name in renamed else _how(ours, theirs)
        if how is None and name in entries and entries[name].how is How.MEANING:
            how = How.MEANING
        yield None if how is None else Change(name=name, how=how, baseline=_said(ours), candidate=_said(theirs))


def _at(name: str, renamed: Mapping[str, str]) -> str:
    """Its name on the candidate. Arguments go with their method."""
    owner = name.partition("(")[0]
    return renamed.get(name) or renamed.get(owner, owner) + name.removeprefix(owner)


def _how(ours: Offer, theirs: Offer | None) -> How | None:
    if theirs is None:
        return How.GONE
    if (ours.kind, ours.form) != (theirs.kind, theirs.form):
        return How.FORM
    if ours.default != theirs.default:
        return How.DEFAULT
    return How.TYPE if ours.type != theirs.type else None


def _added(baseline: Offers, candidate: Offers, renamed: Mapping[str, str]) -> Iterator[Change]:
    """What the candidate alone offers: arguments that a caller has to give, what a client of the user's own has to have, and the rest,
    which is new. Arguments of a new method are left out, and options, which are those of vLLM's release."""
    methods = {renamed.get(name, name) for name, offer in baseline.items() if offer.kind in ("method", "import")}
    there = {*baseline, *(_at(name, renamed) for name in baseline)}
    told = {offer.kind for offer in baseline.values()}
    for name, theirs in candidate.items():
        of_parameter = theirs.kind == "parameter"
        if name in there or theirs.kind == "option" or (of_parameter and name.partition("(")[0] not in methods):
            continue
        must = of_parameter and theirs.default is None and not name.partition("(")[2].startswith("*")
        must |= theirs.kind == "need" and "need" in told
        yield Change(name=name, how=How.REQUIRED if must else How.NEW, candidate=_said(theirs))


def _said(offer: Offer | None) -> str:
    """ "async generate → InferenceEngineOutput", "num_engines: int = 1"."""
    if offer is None:
        return ""
    arrow = " → " if offer.kind == "method" else ": "
    said = " ".join(filter(None, (offer.form if offer.kind in ("method", "attribute") else "", offer.name)))
    return (
        said + (arrow + offer.type if offer.type else "") + (f" = {offer.default}" if offer.default is not None else "")
    )
