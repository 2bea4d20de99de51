"""From recordings to verdicts, comparisons and the gate's answer. Pure: no live stack."""
