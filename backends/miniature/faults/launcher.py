"""Other stacks that fail without a name or in no time, or that outlive their end."""

from __future__ import annotations

from backends.miniature.faults.registry import seeded
from backends.miniature.launcher import Launcher
from harness.contract.messages import OtherStackRequest


@seeded("start_fails_badly", "cause_not_named", caught_by=["failed_start"])
class CauseNotNamed(Launcher):
    """The error of a start that fails sends the reader to a log, and names no path and no option."""

    def refuse(self, cause: str) -> str | None:
        self.fired += 1
        return "RuntimeError: Engine core initialization failed. See root cause above."


@seeded("start_fails_badly", "not_at_all", caught_by=["failed_start"])
class StartsAnyway(Launcher):
    """A start with a wrong option succeeds."""

    def refuse(self, cause: str) -> str | None:
        if cause.startswith("/"):
            return super().refuse(cause)
        self.fired += 1
        return None


@seeded("start_fails_badly", "waits_for_ever", caught_by=["failed_start"])
class WaitsForEver(Launcher):
    """A start without weights waits for a server that has died already."""

    def waits(self, request: OtherStackRequest) -> float:
        if request.wrong != "no weights":
            return super().waits(request)
        self.fired += 1
        return 10 * request.start_s


@seeded("stack_outlives_its_end", "failed_start", caught_by=["failed_start"])
class FailedStartLeavesAnEngine(Launcher):
    """An engine stays that had come up before the start failed."""

    def give_up(self) -> None:
        self.fired += 1
        self.running = {"engine"}


@seeded("stack_outlives_its_end", "ended", caught_by=["stack_ends"])
class EndedLeavesItsServers(Launcher):
    """Servers are told to shut down, and nobody ends their processes."""

    def end(self) -> None:
        self.fired += 1
        self.running = {"server"}


@seeded("stack_outlives_its_end", "killed", caught_by=["stack_ends"])
class KilledLeavesItsRouter(Launcher):
    """A router outlives the process that started it, if that is killed."""

    def die(self) -> None:
        self.fired += 1
        self.running = {"router"}
