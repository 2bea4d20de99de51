"""Progress of long steps: one line per step, with a spinner and the elapsed time on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

Say = Callable[[str], None]
"""Shows how far the current step is, in a few words; "" if unknown."""
Progress = Callable[[str], AbstractContextManager[Say]]
"""``with progress("environment x: installing 210 packages") as say: …`` shows the step while the block runs."""


@contextmanager
def silent(_message: str) -> Iterator[Say]:
    """No progress: for steps that take no time."""
    yield lambda _: None


def console_progress(stream: TextIO | None = None) -> Progress:
    """Progress on `stream` (default: standard error): a spinner on a terminal, plain lines elsewhere."""
    out = sys.stderr if stream is None else stream
    return _spinner(out) if out.isatty() else _lines(out)


def _lines(out: TextIO) -> Progress:
    @contextmanager
    def step(message: str) -> Iterator[Say]:
        out.write(f"{message} …\n")
        out.flush()
        began = time.monotonic()

        def say(words: str) -> None:
            out.write(f"{message}: {time.monotonic() - began:.0f} s{words and f', {words}'}\n")
            out.flush()

        yield say
        out.write(f"{message}: done in {time.monotonic() - began:.0f} s\n")
        out.flush()

    return step


def _spinner(out: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    @contextmanager
    def step(message: str) -> Iterator[Say]:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Bar(*columns, console=Console(file=out), transient=True) as bar:
            task = bar.add_task(message, total=None)
            yield lambda words: bar.update(task, description=f"{message}{words and f': {words}'}")

    return step


@contextmanager
def counted(
    what: str, total: int, *, bar: bool = True, stream: TextIO | None = None
) -> Iterator[Callable[[str], None]]:
    """Progress of `total` steps of one kind: each call says that one is done, in its own line.

    On a terminal, `bar` adds a progress bar below the lines. Other progress must not run beside the bar.
    """
    out = sys.stderr if stream is None else stream
    if not bar or not out.isatty():
        yield lambda line: print(line, file=out, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(file=out, highlight=False), transient=True) as shown:
        task = shown.add_task(what, total=total)

        def done(line: str) -> None:
            shown.console.print(line, markup=False, soft_wrap=True)
            shown.advance(task)

        yield done
