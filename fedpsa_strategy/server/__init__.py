"""The asynchronous server: Flower's interface, the loop, clocks, events, checkpoints."""
