"""What is loaded inside vLLM's own processes: plugin, engine tap, gloo weight transfer."""
