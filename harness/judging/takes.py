"""Merges several takes of one scenario into one verdict per check: red in any take is red. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.records.verdict import WORST_FIRST, Conformance, Margin, Parity, Verdict


def merge(takes: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """The worst take's verdict stands for each check, its reason unchanged; the evidence counts the takes with its status.

    `takes` holds the verdicts of each take; a single take is returned as it is.
    """
    if len(takes) == 1:
        return list(takes[0])
    by_id: dict[str, list[Verdict]] = {}
    for verdict in (v for take in takes for v in take):
        by_id.setdefault(verdict.id, []).append(verdict)
    return [_merged(same, len(takes)) for same in by_id.values()]


def _merged(same: Sequence[Verdict], takes: int) -> Verdict:
    worst = min(same, key=lambda v: WORST_FIRST.index(v.status))
    alike = sum(v.status == worst.status for v in same)
    evidence = list(worst.evidence)
    if worst.status not in (Conformance.PASS, Parity.PARITY):
        evidence.append({"takes": f"{worst.status} in {alike} of {takes} takes"})
    margins = [v.margin for v in same if v.margin is not None]
    margin = widest(margins) if worst.margin is not None else None
    effects = list({msgspec.json.encode(one): one for v in same for one in v.effects}.values())
    exposures = list({msgspec.json.encode(one): one for v in same for one in v.exposures}.values())
    visits = list({msgspec.json.encode(one): one for v in same for one in v.visits}.values())
    told = {"exposures": exposures, "effects": effects, "visits": visits}
    return msgspec.structs.replace(worst, evidence=evidence, takes=takes, alike=alike, margin=margin, **told)


def widest(margins: Sequence[Margin]) -> Margin:
    """Merges several margins of one check: the largest measurement, and each fault at its hardest to see."""
    faults: dict[str, float] = {}
    for name, size in (item for margin in margins for item in margin.faults.items()):
        faults[name] = min(size, faults.get(name, size))
    rates = [m.false_alarm_rate for m in margins if m.false_alarm_rate is not None]
    powers = [m.power for m in margins if m.power is not None]
    return Margin(
        unit=margins[0].unit,
        measured=max(m.measured for m in margins),
        bound=max(m.bound for m in margins),
        faults=faults,
        false_alarm_rate=max(rates, default=None),
        power=min(powers, default=None),
    )
