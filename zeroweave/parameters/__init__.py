"""A model's own parameters while their values are sharded: where they live in modules, and what stands for them."""
