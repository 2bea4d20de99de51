"""Runs git on a user's checkout. Nothing here changes the working tree, the index or the branches of that checkout."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.contract.errors import UsageError

GIT_DEADLINE_S = 300.0
ALONE = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
"""Options that keep the checkout's own hooks from running in a worktree of ours."""


def environment() -> dict[str, str]:
    """Variables for git: none of a git that calls us (a hook), no lock on the index for what only reads, no large files fetched."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return inherited | {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }


def run_git(tree: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """git in `tree`, whatever its exit status. Raises UsageError if git is missing or hangs."""
    try:
        return subprocess.run(
            ["git", *ALONE, *arguments],
            cwd=tree,
            env=environment(),
            capture_output=True,
            timeout=GIT_DEADLINE_S,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("git is not installed, and a checkout is read with it", next_step="install git") from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"git {arguments[0]} in {tree} was not done after {GIT_DEADLINE_S:.0f} s", next_step="try it by hand"
        ) from None


def git(tree: Path, *arguments: str) -> str:
    """What git says, without the last line's end. Raises UsageError with git's own words if it fails."""
    said = run_git(tree, *arguments)
    if said.returncode != 0:
        raise UsageError(
            f"git {' '.join(arguments)} failed in {tree}: {said.stderr.decode(errors='replace').strip()[-600:]}",
            next_step="try it by hand",
        )
    return said.stdout.decode(errors="replace").rstrip("\n")


def commit_of(tree: Path, revision: str) -> str:
    """The commit's full hash. Raises UsageError for a revision that the checkout does not have."""
    said = run_git(tree, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if said.returncode != 0:
        raise UsageError(f"{tree} has no revision {revision!r}", next_step="name a commit, tag or branch of it")
    return said.stdout.decode().strip()


@contextmanager
def worktree(tree: Path, revision: str) -> Iterator[Path]:
    """A worktree of the checkout at `revision`, in a temporary folder. It is removed at the end, also after Ctrl-C."""
    commit = commit_of(tree, revision)
    try:
        with tempfile.TemporaryDirectory(prefix="parity-tree-") as folder:
            made = Path(folder).resolve() / tree.name
            try:
                git(tree, "worktree", "add", "--detach", "--force", str(made), commit)
                yield made
            finally:
                run_git(tree, "worktree", "remove", "--force", "--force", str(made))
    finally:
        run_git(tree, "worktree", "prune")  # forgets a worktree that could not be removed: its folder is gone now
