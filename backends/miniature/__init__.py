"""A tiny, correct rollout stack of nothing but Python, and the faults that break it: the suite is proved on it.

`model` is what it computes, `engine` one server, `router` and `client` the way to it, `stack` the adapter, `reference` its
oracle, `faults` the broken ones. Every part keeps what could break in a small method of its own: a fault is a subclass that
overrides one.
"""
