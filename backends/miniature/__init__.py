"""A tiny, correct rollout stack in pure Python, and the faults that break it. They prove the suite.

`model` is its language model, `engine` one server, `router` and `client` the way to the servers, `stack` the adapter, `reference`
the oracle, `faults` the broken parts. Each step that could break has its own small method: a fault is a subclass that overrides
one.
"""

import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # read at NumPy's import: on small matrices a second thread only waits
