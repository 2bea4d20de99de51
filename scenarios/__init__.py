"""Scenarios: what is done to a stack. They know no stack and assert nothing about which one it is."""
