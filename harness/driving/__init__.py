"""Driving one stack: the host process, its supervisor, and the handle that records each call."""
