"""What the command line prints and starts: launching ranks, checking the machine, the demo and its tables."""
