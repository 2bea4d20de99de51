"""Clients that end badly."""

from __future__ import annotations

from typing import Any

from backends.miniature.client import Client
from backends.miniature.engine import Output
from backends.miniature.faults.registry import REFUSED, seeded
from harness.contract.faults import ROWS
from harness.contract.messages import SessionId


@seeded("client_lives", "configured_by_another_name", caught_by=["client_lives"], corrupts=ROWS)
class ConfiguredByAnotherName(Client):
    """A client that is made of the configuration asks for the model by its path, and not by the name that engines serve."""

    def configure(self, served: str, *, merged_adapter: bool) -> None:
        self.fired += 1
        super().configure(f"/checkpoints/{served}", merged_adapter=merged_adapter)


@seeded("client_lives", "configured_by_a_merged_adapter", caught_by=["client_lives"])
class ConfiguredByAMergedAdapter(Client):
    """A client asks for the configuration's adapter by name, although the trainer merges it into the weights."""

    def configure(self, served: str, *, merged_adapter: bool) -> None:
        self.fired += merged_adapter
        super().configure("an adapter" if merged_adapter else served, merged_adapter=merged_adapter)


@seeded("client_lives", "gone_with_its_owner", caught_by=["client_lives"], corrupts=ROWS)
class GoneWithItsOwner(Client):
    """The servers end when their owner drops all but the client."""

    def alone(self) -> None:
        self.fired += 1
        self.close()


@seeded("client_lives", "leaves_a_session", caught_by=["client_lives"])
class LeavesASession(Client):
    """A client that nobody uses any more leaves its session open."""

    def left(self) -> list[str]:
        self.fired += 1
        return ["Unclosed client session"]


@seeded("client_lives", "closed_without_a_name", caught_by=["client_lives"], changes=REFUSED)
class ClosedWithoutAName(Client):
    """A closed client fails with an error that says nothing."""

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if self.closed:
            self.fired += 1
            raise RuntimeError
        return await super().row(session, prompt, params, **more)
