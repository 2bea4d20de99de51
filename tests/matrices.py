"""A made-up matrix of four releases, from the verdicts of `tests.synthetic`: something is fixed and something broke at each step."""

from __future__ import annotations

import msgspec

from harness.records.verdict import Verdict
from reports import matrix
from reports.matrix import Matrix, Release
from tests import synthetic
from tests.synthetic import HTTP, LEGACY
from tests.test_reports import HOSTILE

NEXT, LATEST = "skyrl-0.3.0:http", "skyrl-0.4.0:http"


def releases() -> list[Release]:
    judgement = synthetic.judgement()
    of = {
        target: [v for v in judgement.verdicts if v.baseline is None and v.target == target]
        for target in (LEGACY, HTTP)
    }
    of[NEXT] = _later(of[HTTP], NEXT, fixed="openai.test_unknown_model")
    of[LATEST] = _later(of[NEXT], LATEST, fixed="sampling.test_stop_string", broke="weights.test_chunked")
    return [release(target, verdicts) for target, verdicts in of.items()]


def hostile() -> list[Release]:
    """The same; a check of the latest one says what no page may take for more than text."""
    *earlier, latest = releases()
    bad = "".join(HOSTILE)
    fields = {"status": "fail", "reason": bad, "evidence": [{bad: bad, "expected": bad, "actual": [float("nan")]}]}
    told = [
        (run, msgspec.structs.replace(v, **fields) if v.scenario == "ordering.test_ragged_lengths" else v)
        for run, v in latest.verdicts
    ]
    return [*earlier, msgspec.structs.replace(latest, verdicts=told)]


def release(target: str, verdicts: list[Verdict], **fields) -> Release:
    run = msgspec.structs.replace(synthetic.judgement().run, run_id=f"of-{target}", headers=[synthetic.header(target)])
    return Release(target=target, runs=[run], verdicts=[(run.run_id, v) for v in verdicts], **fields)


def _later(verdicts: list[Verdict], target: str, *, fixed: str, broke: str = "") -> list[Verdict]:
    moved = [msgspec.structs.replace(v, target=target) for v in verdicts]
    return [_broken(v) if v.scenario == broke else _passed(v) if v.scenario == fixed else v for v in moved]


def _passed(verdict: Verdict) -> Verdict:
    fields = {"status": "pass", "reason": "", "known": None, "explained": {}, "evidence": [], "blame": None}
    return msgspec.structs.replace(verdict, **fields)


def _broken(verdict: Verdict) -> Verdict:
    evidence = [{"row": 0, "expected": [1, 2, 3, 4], "actual": [1, 2, 9, 4]}]
    return msgspec.structs.replace(verdict, status="fail", reason="a chunk of the sync was lost", evidence=evidence)


def build(found: list[Release] | None = None, command: str = "parity matrix --from monday") -> Matrix:
    return matrix.build(releases() if found is None else found, synthetic.plan(), synthetic.ledger(), command)
