"""The harness: drives scenarios, records what happened, judges the recording. Knows no stack and no scenario."""

__version__ = "0.1.0"
