"""A framework's source tree, and one checkout of it: a git working tree that is driven in place of a release (`--checkout`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, final

import msgspec


@final
class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution whose source is in the tree. Paths are relative to the tree's root."""

    distribution: str
    module: str
    """Folder of its top-level package."""
    version: str
    """File that states its version, as ``version = "…"`` or ``__version__ = "…"``."""


@final
class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source tree has its parts, and which package of its requirements is the engine."""

    parts: tuple[Part, ...]
    """The first one gives the tree its version."""
    engine: str
    """Distribution that the tree's own requirements pin."""
    engines: Mapping[Literal["cpu", "cuda"], str]
    """Kind of engine → distribution that is installed, in the version of `engine`."""


@final
class Checkout(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a git working tree."""

    path: str
    commit: str
    branch: str | None = None
    """None on a detached HEAD."""
    changes: str | None = None
    """Hash (8 hex digits) of what differs from the commit; None if nothing does."""
    versions: dict[str, str]
    """Distribution → version, as the tree states it."""

    @property
    def told(self) -> str:
        """ "skyrl 0.3.0, commit 706c3081b (main), uncommitted changes 1f9a0c2e"."""
        name, version = next(iter(self.versions.items()))
        changed = "no uncommitted changes" if self.changes is None else f"uncommitted changes {self.changes}"
        return f"{name} {version}, commit {self.commit[:9]} ({self.branch or 'no branch'}), {changed}"

    @property
    def label(self) -> str:
        """Fit for a target's name: "706c3081b", with uncommitted changes "706c3081b+1f9a0c2e"."""
        return self.commit[:9] + (f"+{self.changes}" if self.changes else "")
