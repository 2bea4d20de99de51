"""The machine: interpreters, environments, ports, memory, and what this machine can run. Knows no scenario."""
