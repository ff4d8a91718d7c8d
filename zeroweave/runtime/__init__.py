"""What happens in a step: buckets, gradients, and the replay of the schedule."""
