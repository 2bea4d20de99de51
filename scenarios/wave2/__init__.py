"""Wave 2 (SkyRL #1014): generation that does not wait for training, interrupted and continued."""
