"""The learning task: data, partitions, models and local training.

Nothing in this package knows about Flower, strategies or configuration: every function takes plain
arguments and a client may run it in a process that lives for a single update.
"""
