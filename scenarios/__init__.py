"""Scenarios: what is done to a stack. They do not know which stack it is and assert nothing."""
