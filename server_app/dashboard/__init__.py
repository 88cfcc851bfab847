"""A live page about runs: reads their folders, changes nothing, needs no network.

The page's files in `static` are used from a checkout; the ServerApp never imports this package.
"""
