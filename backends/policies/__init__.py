"""Makes, trains and quantizes policy versions, and holds them in multi-rank trainers. Runs in a stack's environment."""
