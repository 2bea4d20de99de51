"""Do other faults stay red beside a known divergence? Pure; `harness/proving/prove.py` drives (`parity prove --ledger`).

Each entry's scenario is driven on the correct stack and under every fault that may turn the entry's check red. Then the ledger is
applied. A verdict that the fault turned red and that the entry explains is *swallowed*: the entry's reason is too wide.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec

from harness.judging.ledger import Entry, Ledger, apply
from harness.proving.entries import EntryProof, LedgerProof, Stays, Tried, UnderFault
from harness.proving.kill_matrix import Baseline, Lap, settled


def prove_entries(
    ledger: Ledger, target: str, tried: Mapping[str, Tried], laps: Sequence[Lap], today: datetime.date
) -> LedgerProof:
    """Judge the laps in the entries' scenarios. `tried`: topology → its scenarios and faults; `laps`: those with `beside` set."""
    proofs: list[EntryProof] = []
    problems: list[str] = []
    for topology, names in tried.items():
        here = {lap.fault: _explained(lap, ledger, today) for lap in laps if lap.beside == topology}
        control = here.pop(None, None)
        correct = Baseline(control.verdicts if control else [], control.error if control else "it was not driven")
        problems += [f"the ledger's scenarios in {topology}: {said}" for said in _of_control(correct)]
        for entry in ledger.entries:
            covered = {name for name in names if entry.at(name, topology, target)}
            ids = sorted({fault for name in covered for fault in names[name]})
            known = sum(verdict.known == entry.id for verdict in (control.verdicts if control else ()))
            under = [_under(fault, here.get(fault), entry, covered, correct) for fault in ids]
            if under:
                proofs.append(EntryProof(entry=entry.id, topology=topology, known=known, faults=under))
                problems += _problems(proofs[-1])
    driven = {proof.entry for proof in proofs}
    untried = [entry.id for entry in ledger.entries if target in entry.stacks and entry.id not in driven]
    return LedgerProof(entries=proofs, untried=untried, problems=problems)


def _explained(lap: Lap, ledger: Ledger, today: datetime.date) -> Lap:
    return msgspec.structs.replace(lap, verdicts=apply(ledger, lap.verdicts, today)[0])


def _of_control(correct: Baseline) -> Iterator[str]:
    if correct.control.error:
        yield f"the correct stack could not be driven to its end: {correct.control.error}"
    for red in correct.control.reds:
        yield f"the correct stack is red: {red.check} in {red.scenario}: {red.reason}"


def _under(fault: str, lap: Lap | None, entry: Entry, scenarios: Set[str], correct: Baseline) -> UnderFault:
    if lap is None or lap.error:
        said = lap.error if lap else "the run ended before"
        return UnderFault(fault=fault, stays=Stays.NOT_DRIVEN, said=said)
    turned = [v for v in settled(lap.verdicts) if v.scenario in scenarios and correct.turned(v)]
    for verdict in turned:
        if verdict.known == entry.id:
            said = f"{verdict.check} in {verdict.scenario}: {verdict.reason}"
            return UnderFault(fault=fault, stays=Stays.SWALLOWED, said=said)
    return UnderFault(fault=fault, stays=Stays.RED if any(v.red for v in turned) else Stays.UNSEEN)


def _problems(proof: EntryProof) -> Iterator[str]:
    for one in proof.faults:
        if one.stays is Stays.SWALLOWED:
            yield f"ledger entry {proof.entry} swallows {one.fault}: {one.said}"
        elif one.stays is Stays.NOT_DRIVEN:
            yield f"ledger entry {proof.entry} under {one.fault}: not driven: {one.said}"
