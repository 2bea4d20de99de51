"""The named errors of the harness, in the order in which a run can meet them.

1. the command line and the files it names        `UsageError`
2. the environment of a target                    `EnvironmentBroken`
3. the start of a stack                           `StartFailed`, `NotFree`
4. a call through the contract                    `NotOffered`, `CallFailed`, `CallTimedOut`, `MissedMoment`, `StackDied`
5. reading a recording back                       `RecordingError`
6. reading the ledger of known divergences        `LedgerError`

Each says what was attempted, on which stack, and what to do next. No other error crosses a room's boundary.
"""

from __future__ import annotations

from enum import StrEnum

CANCELLED = "Cancelled"
"""Kind of error of a call that the scenario itself cancelled."""
NEXT_STEP = "\n  next: "
"""Separates an error's message from its next step if both are one text."""


class Blame(StrEnum):
    """Who has to act on a verdict that is not a pass."""

    STACK = "stack"
    """The stack under test broke a promise."""
    SETUP = "setup"
    """The user's configuration asked for something that cannot be done here."""
    ENVIRONMENT = "environment"
    """The machine: memory, ports, interpreters, packages."""
    HARNESS = "harness"
    """The harness itself: an instrument that saw nothing, a check that crashed."""
    DEPENDENCY = "dependency"
    """A package beneath the stack: vLLM, Ray, torch."""


class HarnessError(Exception):
    """Base of all named errors. `blame` says who acts, `next_step` says what to do."""

    blame: Blame = Blame.HARNESS

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}{NEXT_STEP}{self.next_step}" if self.next_step else self.message


class UsageError(HarnessError):
    """The command line, or a file it names, asks for something that does not exist."""

    blame = Blame.SETUP


class ModelLacks(HarnessError):
    """The model's vocabulary lacks something that a scenario needs."""

    blame = Blame.SETUP

    def __init__(self, what: str) -> None:
        super().__init__(f"the model has not {what}", next_step="drive this scenario with the embedded tiny model")


class EnvironmentBroken(HarnessError):
    """A target's virtual environment cannot be made or does not match its requirement file."""

    blame = Blame.ENVIRONMENT


class StackError(HarnessError):
    """Base of a live stack's errors. `log_tail` holds the last lines of its log."""

    blame = Blame.STACK

    def __init__(self, message: str, *, next_step: str = "", log_tail: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.log_tail = log_tail


class StartFailed(StackError):
    """The stack failed while starting, or was not up at its start-up deadline."""


class NotFree(StackError):
    """Another driver has the kept stack, or it is just ending."""

    blame = Blame.SETUP


class NotOffered(StackError):
    """A call needs a capability that the stack does not declare."""

    blame = Blame.SETUP

    def __init__(self, capability: str, target: str = "") -> None:
        super().__init__(
            f"{target or 'this stack'} does not offer {capability!r}",
            next_step="name the capability in the scenario's `needs`, so that the scenario is reported as missing here",
        )
        self.capability = capability


class CallFailed(StackError):
    """The stack raised. `kind` is the exception's class name on the stack's side, `status` an HTTP status if it had one, `place`
    where in the stack's own code it was raised."""

    def __init__(
        self, kind: str, message: str, *, status: int | None = None, place: str = "", log_tail: str = ""
    ) -> None:
        super().__init__(f"{kind}: {message}", log_tail=log_tail)
        self.kind = kind
        self.detail = message
        self.status = status
        self.place = place


class CallTimedOut(StackError):
    """A call passed its deadline. The driver kills the host: a later answer would be useless."""


class MissedMoment(StackError):
    """Requests ended before the driver, on a busy machine, saw them in flight. This says nothing about the stack."""

    blame = Blame.HARNESS


class StackDied(StackError):
    """The host process, or one that the stack needs (engine, server, router), ended while it was needed."""


class RecordingError(HarnessError):
    """A recording cannot be judged: cut off, of another format, or not a recording."""


class LedgerError(HarnessError):
    """A ledger entry is malformed, expired, or matches nothing."""

    blame = Blame.SETUP
