"""An item's outcome in pytest: ledger entries that explain the two stacks' verdicts also explain their comparison."""

import pytest

from harness.commands.plugin import _settle
from harness.judging.ledger import load
from harness.records.verdict import Conformance, Parity
from tests.test_ledger import verdict

OLD, NEW = "stack:old", "stack:new"
ENTRY = """
[[divergence]]
id = "both-ignore-seeds"
scenario = "stops.test_a"
check = "stops.text"
targets = ["stack:old", "stack:new"]
reason = "seeds are ignored"
cap = 2
owner = "maintainers"
expires = 2999-12-31
source = "vllm/sampler.py:1: no generator is used"
"""


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "known.toml"
    path.write_text(ENTRY)
    return load(path)


def stacks(reason):
    return [verdict(target=target, status=Conformance.FAIL, reason=reason) for target in (OLD, NEW)]


def compared(reason):
    return [verdict(target=NEW, baseline=OLD, status=Parity.BOTH_WRONG, reason=f"both: {reason}")]


def test_both_wrong_is_known_when_each_sides_own_failure_is(ledger):
    known = "seeds are ignored"
    with pytest.raises(pytest.xfail.Exception, match="both-ignore-seeds"):
        _settle(compared(known), stacks(known), ledger)


def test_it_is_red_when_a_side_failed_for_another_reason(ledger):
    with pytest.raises(pytest.fail.Exception, match="BOTH-WRONG"):
        _settle(compared("something new"), stacks("something new"), ledger)


def test_the_stacks_own_verdicts_do_not_decide_the_comparisons_outcome(ledger):
    parity = [verdict(target=NEW, baseline=OLD, status=Parity.PARITY, reason="")]
    assert _settle(parity, stacks("something new"), ledger) is None
