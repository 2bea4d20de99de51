"""Small git repositories for tests: each commit sets some files."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.machine.git import environment

AUTHOR = ("-c", "user.name=Ann Author", "-c", "user.email=ann@example.org")


class Repository:
    """A new repository in `tree`, with the branch "main"."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        tree.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        command = ["git", *AUTHOR, *arguments]
        return subprocess.run(
            command, cwd=self.tree, env=environment(), check=True, capture_output=True, text=True
        ).stdout.strip()

    def file(self, name: str, text: str) -> None:
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, subject: str, files: dict[str, str] | None = None) -> str:
        """Commit these files and return the commit's hash."""
        for name, text in (files or {}).items():
            self.file(name, text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", subject)
        return self.git("rev-parse", "HEAD")

    def state(self) -> tuple[str, ...]:
        """Everything about it that a reader must not change: HEAD, status, refs, worktrees, a bisection."""
        return (
            self.git("symbolic-ref", "HEAD"),
            self.git("status", "--porcelain", "--ignored"),
            self.git("for-each-ref"),
            self.git("worktree", "list"),
            self.git("stash", "list"),
        )
