"""What happens in a step: buckets, gradients, parameters at rest, and the replay of the schedule."""
