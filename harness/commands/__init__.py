"""What users call: the `parity` command and the pytest plugin."""
