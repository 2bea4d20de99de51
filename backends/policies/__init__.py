"""Policy versions: how they are made, trained, quantized, and held by trainers of several ranks. Runs in a stack's environment."""
