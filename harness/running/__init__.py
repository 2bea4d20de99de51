"""A whole run: which scenarios there are, which stacks are started when, and how what was recorded is judged."""
