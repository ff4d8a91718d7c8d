"""What ranks tell each other beside the collectives of training: agreements, failures, and where they are."""
