"""Events of a run; what a test does not name is filled in."""

from fedpsa_strategy.server.events import RunStarted, Uploaded

_STARTED = {"num_clients": 4, "max_in_flight": 2, "num_parameters": 9, "version": 0}
_UPLOADED = {
    **{"sequence": 0, "client": 0, "node_id": 2**64 - 1, "version": 0, "staleness": 0},
    **{"num_examples": 1, "squared_norm": 1.0, "num_bytes": 100},
}


def started(time=0.0, **fields):
    return RunStarted(time=time, **(_STARTED | fields))


def uploaded(time, **fields):
    return Uploaded(time=time, **(_UPLOADED | fields))
