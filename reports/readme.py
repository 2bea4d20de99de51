"""Tables in README.md that come from runs. Two markers with its name enclose each table."""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.contract.errors import UsageError


def block(text: str, name: str) -> list[str]:
    """The lines between the markers of that name. Raises UsageError for a text without them."""
    return _found(text, name)["lines"].splitlines()


def with_block(text: str, name: str, lines: Iterable[str]) -> str:
    """The text with other lines between these markers. Raises UsageError for a text without them."""
    found = _found(text, name)
    return text[: found.start("lines")] + "".join(f"{line}\n" for line in lines) + text[found.end("lines") :]


def _found(text: str, name: str) -> re.Match[str]:
    opens, closes = f"<!-- {name} -->", f"<!-- /{name} -->"
    found = re.search(rf"{re.escape(opens)}\n(?P<lines>.*?){re.escape(closes)}", text, re.DOTALL)
    if found is None:
        raise UsageError(f"there is no block {opens} … {closes}", next_step="put the two markers back into README.md")
    return found
