"""What runs on the machines of a cluster when clients are simulated there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message, RecordDict

from simulation.engines.local.internals import SERVER_NODE_ID, act_as
from simulation.engines.local.worker import EMPTY_STATE, Runner, Setup
from simulation.objects import adopt

_adopted: set[str] = set()


def execute(
    setup: Setup, node_config: Mapping[str, Any], message: Message, state: bytes
) -> tuple[Message, bytes | None]:
    """Return a node's reply to a message, and its pickled state after it; None: unchanged.

    The setup comes without the nodes, of which there may be many.
    """
    reply, new_state = _runner(setup, message, node_config).run(message, state)
    return reply, None if new_state == state else new_state


def ask_first_node(setup: Setup) -> None:
    """Ask the first node for its data; what is missing on this machine is raised."""
    act_as(SERVER_NODE_ID)
    message = Message(RecordDict(), SERVER_NODE_ID + 1, "query")
    node_config = {"partition-id": 0, "num-partitions": setup.run_config["num-clients"]}
    _runner(setup, message, node_config).call(message, EMPTY_STATE)


def _runner(setup: Setup, message: Message, node_config: Mapping[str, Any]) -> Runner:
    # Once in a process: what an object keeps from one message to the next is not thrown away.
    adopt({name: setup.objects[name] for name in setup.objects.keys() - _adopted})
    _adopted.update(setup.objects)
    return Runner(replace(setup, node_configs={message.metadata.dst_node_id: node_config}))
