"""Pulling replies from a grid, some of which may be unreadable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedpsa_strategy.wire.error_codes import MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE

# What Flower's code raises when it turns the bytes of a reply into a message: protobuf's own error;
# KeyError for objects that are missing or of unknown types, and for values that are missing in a
# description; ValueError and TypeError for parts that do not fit, texts that are no UTF-8 or JSON,
# and metrics without a value; AttributeError for objects that are no messages. A grid that is gone,
# or whose run has ended, raises none of these: httpx's errors, which are no ValueErrors, grpc's
# RpcError, OSError, RuntimeError, and Flower's RunNotRunningException, which is a BaseException.
DECODING_ERRORS = (
    ArithmeticError,
    AttributeError,
    DecodeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

MOST_ASKED = 128  # replies asked for at a time, where others can wait


@dataclass
class Pulled:
    """What a pull found.

    Parameters
    ----------
    replies : list[Message]
        The replies that can be read.
    unreadable : dict[str, str]
        Ids of messages whose reply cannot be, and the error.
    lost : list[str]
        Ids of messages whose reply was taken and lost, by no fault of its sender.
    """

    replies: list[Message] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


class Puller:
    """Pulls replies, and finds the one that cannot be read.

    A SuperLink deletes all the replies that it hands out in one pull. If one of them cannot be
    decoded, `pull_messages` raises and the others are lost with it. Which they were, the SuperLink
    tells when it is asked again: it does not know their messages any more. From then on everybody
    who was asked is asked singly, until each has answered: the next error has a name.

    Parameters
    ----------
    grid : Grid
        Where the nodes are.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._singly: set[str] = set()
        self._doubtful: set[str] = set()  # their replies may be lost

    def pull(self, message_ids: Iterable[str]) -> Pulled:
        """Return what has arrived for these messages."""
        found = Pulled()
        wanted = list(message_ids)
        together = [key for key in wanted if key not in self._singly]
        if len(together) == 1:
            self._pull_one(together[0], found)
        elif together:
            try:
                found.replies += self._grid.pull_messages(together)
            except DECODING_ERRORS:
                self._singly.update(together)
                self._doubtful.update(together)
        for key in wanted if self._singly else ():
            if key in self._singly:
                self._pull_one(key, found)
        return found

    def watch(self, message_id: str) -> None:
        """Ask for the reply to this message singly: it was sent again."""
        self._singly.add(message_id)

    def forget(self, message_id: str) -> None:
        """Do not think of a message any more: it is answered, or given up."""
        self._singly.discard(message_id)
        self._doubtful.discard(message_id)

    def _pull_one(self, key: str, found: Pulled) -> None:
        try:
            replies = list(self._grid.pull_messages([key]))
        except DECODING_ERRORS as error:
            found.unreadable[key] = f"the reply cannot be decoded: {type(error).__name__}: {error}"
            return
        for reply in replies:
            if key in self._doubtful and _is_unavailable(reply):
                found.lost.append(key)
            else:
                found.replies.append(reply)


def is_gone(reply: Message, node_id: int) -> bool:
    """Return whether this is Flower's word, and not the node's, that the node is gone."""
    if not reply.has_error() or reply.metadata.src_node_id == node_id:
        return False
    return reply.error.code == NODE_UNAVAILABLE


def _is_unavailable(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == MESSAGE_UNAVAILABLE
