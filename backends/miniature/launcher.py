"""The miniature's other stacks. It has no processes: what a stack has, and what is left of it, are names that its launcher keeps."""

from __future__ import annotations

from harness.contract.messages import OtherStackRequest, OtherStackResult, Remnant

CAUSES = {"no model": "/checkpoints/none", "no weights": "/checkpoints/empty", "option": "max_model_len"}
"""Why a start fails → what its error names."""
PARTS = ("engine", "router", "server")


class Launcher:
    """Starts and ends other stacks."""

    def __init__(self) -> None:
        self.fired = 0
        self.running: set[str] = set()

    def live(self, request: OtherStackRequest) -> OtherStackResult:
        self.running = set(PARTS)
        ran = self._remnants()
        error = None if request.wrong is None else self.refuse(CAUSES[request.wrong])
        took_s = self.waits(request)
        if request.then == "killed":
            self.die()
        else:
            (self.end if request.wrong is None else self.give_up)()
        left = self._remnants()
        killed = request.then == "killed"
        return OtherStackResult(
            error=error,
            names=[] if request.wrong is None else [CAUSES[request.wrong]],
            in_time=took_s <= request.start_s,
            took_s=took_s,
            ran=ran,
            left=[] if killed else left,
            outlived=left if killed else [],
        )

    def refuse(self, cause: str) -> str | None:
        """The error of a start that cannot succeed; None if it succeeds anyway."""
        return f"ValueError: {cause} cannot be used"

    def waits(self, _request: OtherStackRequest) -> float:
        """Seconds that a start takes."""
        return 1.0

    def end(self) -> None:
        """End a stack that is up."""
        self.running.clear()

    def give_up(self) -> None:
        """End what there is of a stack that cannot start."""
        self.running.clear()

    def die(self) -> None:
        """The process that owns the stack is killed."""
        self.running.clear()

    def _remnants(self) -> list[Remnant]:
        return [Remnant(kind=part, what=f"{part} of the other stack") for part in sorted(self.running)]
