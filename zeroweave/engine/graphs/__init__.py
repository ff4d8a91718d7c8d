"""Whole steps as CUDA graphs: what the device does in a window is captured once, compared once, and then replayed."""
