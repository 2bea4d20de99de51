"""The fault instruments of real stacks: what they break on the wire, and which check must catch it."""
