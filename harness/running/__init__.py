"""A whole run: the catalogue of scenarios, the starts of stacks, and the judging of recordings."""
