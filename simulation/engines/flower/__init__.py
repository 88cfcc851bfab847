"""Start Flower's own processes, give them a run, and end them all."""
