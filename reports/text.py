"""Prepares data from outside for display: control characters become visible, long values short. Pure."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any, final

import msgspec

from harness.records.differing import common_prefix

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories without a visible form: controls, bidi overrides, zero-width, surrogates, …"""
_NOT_PLAIN = re.compile(r"[^\n\x20-\x7e]")
"""Characters that need a check one by one."""
SHORT = 320
"""Characters of a value that are shown before it is folded."""
LONGEST = 20_000
"""Most characters of a value that are shown; report.json has the rest."""
NOT_FINITE = 1e308
"""Numbers from here on count as not finite: JSON has no infinity, and `reports.json_report.settle` writes the largest float."""


def visible(text: str, *, lines: bool = True) -> str:
    """`text` with each hidden character written out (``␀``, ``\\u202e``). Line ends are kept if `lines`, else ``⏎``."""
    shown = _NOT_PLAIN.sub(lambda found: _visible(found[0]), text)
    return shown if lines else shown.replace("\n", "⏎")


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(character) in HIDDEN:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def one_line(text: str) -> str:
    """`text` visible and on one line."""
    return visible(text, lines=False)


MACHINE_PATH = re.compile(r"(?<![\w.:/>-])/(?:home|root|tmp|work|Users|var|mnt|opt)(?:/[\w.@+~-]+)+")
"""An absolute path below a folder that machines have."""


def of_no_machine(value: Any) -> Any:
    """A JSON value with the last part of each path of a machine: "…/tiny-qwen2"."""
    if isinstance(value, str):
        return MACHINE_PATH.sub(lambda found: f"…/{found[0].rpartition('/')[2]}", value)
    if isinstance(value, dict):
        return {key: of_no_machine(inner) for key, inner in value.items()}
    return [of_no_machine(inner) for inner in value] if isinstance(value, list) else value


def exact(value: Any) -> str:
    """A JSON value in the shortest complete form. Strings are quoted, so that spaces are visible."""
    return visible(json.dumps(value, ensure_ascii=False, separators=(", ", ": "), default=str))


def shortened(text: str, limit: int = SHORT) -> str:
    """At most `limit` characters, with the number of those left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit} more characters)"


def number(value: float) -> str:
    """A number in three digits, or whole."""
    if not math.isfinite(value) or abs(value) >= NOT_FINITE:
        return "not finite"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"


def many(count: int, word: str) -> str:
    """ "1 cause", "3 causes"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def seconds(value: float) -> str:
    """A wall time: "0.42 s", "75 s", "12 min 5 s"."""
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value // 60:.0f} min {value % 60:.0f} s"


@final
class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A value as a report shows it. `full` is set when `text` is shortened. `mark` is the part that differs."""

    text: str
    full: str | None = None
    before: str = ""
    mark: str = ""
    after: str = ""


def shown(value: Any) -> Shown:
    """One value, shortened if it is long."""
    text = exact(value)
    if len(text) <= SHORT:
        return Shown(text=text)
    return Shown(text=shortened(text), full=shortened(text, LONGEST))


def sides(left: Any, right: Any) -> tuple[Shown, Shown, str]:
    """Two values for display side by side, with their first difference marked and in words.

    Only lists and strings have positions; other values get no mark.
    """
    if type(left) is not type(right) or not isinstance(left, list | str):
        return shown(left), shown(right), ""
    at = common_prefix(left, right)
    if at == len(left) == len(right):
        return shown(left), shown(right), "equal"
    return _marked(left, at), _marked(right, at), told_apart(at, [len(left), len(right)], left)


def told_apart(at: int, lengths: list[int], side: Any) -> str:
    """Where two sides part, in words. `side` is one of them."""
    unit = "character" if isinstance(side, str) else "element"
    one, other = lengths
    return f"first difference at {unit} {at}" + ("" if one == other else f"; lengths {one} and {other}")


def _marked(value: list[Any] | str, at: int) -> Shown:
    """A window around position `at`."""
    whole = shown(value)
    reach = 16 if isinstance(value, list) else 60
    lo, hi = max(0, at - reach), min(len(value), at + reach + 1)
    before, mark, after = value[lo:at], value[at : at + 1], value[at + 1 : hi]
    strip = 1  # the quotes or brackets of each part
    inner = [exact(part)[strip:-strip] if part else "" for part in (before, mark, after)]
    if isinstance(value, list):
        inner[0] += ", " if before else ""
        inner[2] = (", " if after else "") + inner[2]
    opening, closing = ("[", "]") if isinstance(value, list) else ('"', '"')
    return Shown(
        text=whole.text,
        full=shortened(exact(value), LONGEST) if lo > 0 or hi < len(value) or whole.full else None,
        before=opening + ("… " if lo else "") + shortened(inner[0]),
        mark=shortened(inner[1], 80) or "∅",
        after=shortened(inner[2]) + (" …" if hi < len(value) else "") + closing,
    )
