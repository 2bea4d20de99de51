"""A machine without an accelerator, as vLLM sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def none() -> Iterator[None]:
    """vLLM's platform names no type of device, as its UnspecifiedPlatform does on a node without one, and nothing is remembered of
    arguments that were made before."""
    from vllm.engine import arg_utils
    from vllm.platforms import current_platform

    remembered = [one for one in vars(arg_utils).values() if callable(getattr(one, "cache_clear", None))]

    def forget() -> None:
        for one in remembered:
            one.cache_clear()

    forget()
    try:
        with mock.patch.object(current_platform, "device_type", ""):
            yield
    finally:
        forget()
