"""What is told of a run while it trains: see `log`."""
