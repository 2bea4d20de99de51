"""The harness: drives scenarios, records what happened, judges the recording. Names no implementation of a stack."""

from pathlib import Path

__version__ = "0.1.0"

PROJECT = Path(__file__).resolve().parents[1]
"""The folder of the project: where `backends/`, `fixtures/` and `scenarios/` lie."""
