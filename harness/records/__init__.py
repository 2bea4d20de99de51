"""Everything that a run writes: recordings, the oracle's answers, verdicts, its folder. Drives and judges nothing."""
