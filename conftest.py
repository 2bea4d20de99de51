"""Loads the plugin, and keeps what pytest compiles."""

import sys
from pathlib import Path

pytest_plugins = ["harness.commands.plugin"]

if sys.dont_write_bytecode:
    # Not beside the sources, then. To compile the tests with their asserts takes longer than all the rest of collecting them.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).with_name(".pytest_cache") / "bytecode")
