"""Wave 5 (SkyRL #1014): adapters and quantized engines."""
