"""The socket between the local grid and its workers."""

import socket
import threading
from collections.abc import Iterator

import pytest

from simulation.local_channel import Channel

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = tuple(map(Channel, socket.socketpair()))
    yield ends  # type: ignore[misc]
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "strings",
    [
        [],
        [b""],
        [b"one", b"", b"three"],
        [bytes(range(256)) * 1024],  # as long as the buffer
        [b"before", bytes(range(256)) * 5000, b"behind"],
        [b"%d" % number for number in range(3000)],
        [b"x" * 200_000, b"y" * 200_000, b"z" * 200_000],
    ],
    ids=["nothing", "empty", "short", "buffer", "long", "many", "across"],
)
def test_what_is_sent_arrives(pair: Pair, strings: list[bytes]) -> None:
    first, second = pair
    sender = threading.Thread(target=lambda: [first.send(strings) for _ in range(3)], daemon=True)
    sender.start()
    for _ in range(3):
        assert second.receive() == strings
    sender.join()
    assert not second.has_arrived


def test_what_came_together_is_not_forgotten(pair: Pair) -> None:
    first, second = pair
    assert not second.has_arrived
    first.send([b"one"])
    first.send([b"two", b"three"])
    assert second.has_arrived
    assert second.receive() == [b"one"]
    assert second.has_arrived
    assert second.receive() == [b"two", b"three"]
    assert not second.has_arrived


@pytest.mark.parametrize("length", [10, 10**6])
def test_the_end_of_the_other_side_is_noticed(length: int) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(b"\0\0\0\1" + length.to_bytes(8, "big") + b"half")
    theirs.close()
    with pytest.raises(EOFError):
        channel.receive()
    assert channel.has_arrived
    channel.close()
