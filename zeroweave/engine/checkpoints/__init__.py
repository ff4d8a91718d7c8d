"""Checkpoints of an engine: when they are written and loaded, and what is in them."""
