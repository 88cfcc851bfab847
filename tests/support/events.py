"""Events as runs send them; what a test does not care about is filled in."""

from fedpsa_strategy.server import events

LAST_NODE = 2**64 - 3  # JavaScript's numbers cannot hold it


def node(client):
    return {"client": client, "node_id": LAST_NODE - client}


def joined(client, time=0.0):
    return events.NodeJoined(time=time, partition=client, num_examples=1, **node(client))


def started(time=0.0, **more):
    values = {"num_clients": 4, "max_in_flight": 2, "num_parameters": 9, "version": 0}
    return events.RunStarted(time=time, **values | more)


def dispatched(time=0.0, client=0, **more):
    values = {"sequence": 0, "version": 0, "num_bytes": 40, **node(client)}
    return events.Dispatched(time=time, **values | more)


def uploaded(time=0.0, client=0, *, kappa=None, temperature=None, **more):
    values = {"sequence": 0, "version": 0, "staleness": 0, "num_bytes": 100, **node(client)}
    values |= {"num_examples": 1, "squared_norm": 1.0}
    if kappa is not None:
        values["report"] = {"kappa": kappa, "temperature": temperature}
    return events.Uploaded(time=time, **values | more)


def rejected(time=0.0, client=0, reason="no reply", **more):
    values = {"sequence": 0, "version": 0, "reason": reason, **node(client)}
    return events.Rejected(time=time, **values | more)


def aggregated(time, version, uploads, **report):
    return events.Aggregated(time=time, version=version, uploads=uploads, report=report)


def evaluated(time, *, where="server", version=1, uploads=1, **metrics):
    return events.Evaluated(
        time=time, version=version, uploads=uploads, where=where, metrics=metrics
    )


def ended(time=1.0, **more):
    values = {"version": 0, "uploads": 0, "rejected": 0, "reason": "enough"}
    return events.RunEnded(time=time, **values | more)
