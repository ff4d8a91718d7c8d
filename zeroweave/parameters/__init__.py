"""A model's parameters while their values are sharded: where modules have them, and what replaces them."""
