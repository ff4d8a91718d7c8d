"""The user's optimizer on shards: fragments, the step, and clipping by the global norm."""
