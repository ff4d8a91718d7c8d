"""Plans: what a model's training would take in memory and time, found by running one rank of it without memory."""
