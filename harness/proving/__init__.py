"""Stacks are broken on purpose: which check catches which fault."""
