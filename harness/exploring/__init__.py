"""Random sequences of calls, judged by the suite's own checks and shrunk to a scenario."""
