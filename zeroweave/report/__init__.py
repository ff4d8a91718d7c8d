"""What the command line prints and starts: launching ranks, checking the machine, schedules and tables."""
