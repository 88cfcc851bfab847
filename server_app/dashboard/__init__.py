"""The old name of the live page, which is `fedpsa_strategy.watch.dashboard`."""
