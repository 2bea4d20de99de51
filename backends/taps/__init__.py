"""The fault instruments of real stacks: they break calls on the wire, and each fault names the checks that must catch it."""
