"""What a scenario and the rollout plan are."""
