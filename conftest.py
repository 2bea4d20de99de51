"""Loads the plugin, nothing else."""

pytest_plugins = ["harness.commands.plugin"]
