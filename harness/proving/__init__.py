"""Breaks stacks on purpose to show which check catches which fault."""
