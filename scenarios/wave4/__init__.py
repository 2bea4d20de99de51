"""Wave 4 (SkyRL #1014): parallel engines, and models with experts."""
