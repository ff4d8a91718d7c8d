"""Reductions by pulling: each GPU reads its part of the gradients in the others' memory."""
