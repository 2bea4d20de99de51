"""Scenarios and the rollout plan."""
