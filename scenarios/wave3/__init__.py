"""Wave 3 (SkyRL #1014): conversations of several turns."""
