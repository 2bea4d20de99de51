"""Everything that is written down: recordings, the oracle's answers, verdicts, the folder of a run. Drives and judges nothing."""
