"""Code for vLLM stacks: the plugin, engine tap, patches and gloo weight transfer run inside vLLM's own processes."""
