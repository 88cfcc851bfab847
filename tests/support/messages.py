"""Messages as Flower hands them to a ClientApp."""

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict


def delivered(content: RecordDict, kind: str = MessageType.TRAIN) -> Message:
    """Return a message with the id that a SuperLink gives it."""
    message = Message(content, dst_node_id=1, message_type=kind)
    message.metadata.__dict__["_message_id"] = "m1"
    return message


def train_message(arrays: ArrayRecord, config=(), **records) -> Message:
    return delivered(
        RecordDict({"arrays": arrays, "config": ConfigRecord(dict(config)), **records})
    )


def node(node_config=(), run_config=()) -> Context:
    """Return the context of a node that has done nothing yet."""
    return Context(1, 1, dict(node_config), RecordDict(), dict(run_config))
