"""The paper's experiments: what is run, how it is run, and what becomes of it.

``cells``, ``grids`` and ``catalogue`` say what there is to run, ``store`` and ``scheduler`` run it,
and ``rows``, ``tables``, ``figures`` and ``report`` show what came out. These need no more than the
files of finished runs, so that every table can be made anew without training anything.
"""
