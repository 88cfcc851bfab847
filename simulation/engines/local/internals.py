"""The private corners of Flower that a grid of one's own has to touch, all of them.

A `Message` takes its sender from the process that creates it, and its id from the SuperLink. Here
one process acts for many nodes and there is no SuperLink, and Flower has no public way to say so.
`Run` is in the signature of `Grid`, and has no public name.
"""

from __future__ import annotations

from flwr.app import Message
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["RUN_ID", "SERVER_NODE_ID", "Run", "act_as", "give_id"]

SERVER_NODE_ID = 1
RUN_ID = 1


def act_as(node_id: int) -> None:
    """Make this process the sender of the messages that are created in it."""
    TaskIdentity.run_id = RUN_ID
    TaskIdentity.task_id = node_id
    TaskIdentity.node_id = node_id


def give_id(message: Message, message_id: str) -> None:
    """Give a message the id that elsewhere the SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message_id
