"""A live page about runs: reads their folders, changes nothing, needs no network.

It needs the extra `watch`; no strategy and no ServerApp imports this package.
"""
