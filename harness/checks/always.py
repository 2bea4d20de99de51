"""The checks that belong to every scenario. They return None where a scenario gives them nothing to judge."""

from __future__ import annotations

from harness.checks.base import Check
from harness.checks.clean_room import CLEAN_ROOM
from harness.checks.conservation import CONSERVATION
from harness.checks.echo import ECHO
from harness.checks.instruments import INSTRUMENTS
from harness.checks.numbers import NUMBERS
from harness.checks.refusals import REFUSALS

ALWAYS: tuple[Check, ...] = (CLEAN_ROOM, INSTRUMENTS, CONSERVATION, ECHO, NUMBERS, REFUSALS)
