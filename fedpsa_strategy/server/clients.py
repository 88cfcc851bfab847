"""Who takes part in a run, and who may be given the next task."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from fedpsa_strategy.seeds import derive

# So many blind draws before all eligible clients are listed: almost never needed unless almost
# all clients are busy, and then the list is cheap anyway.
_BLIND_DRAWS = 32

_FEWEST_SIZES = 3  # from which on there is a median


@dataclass
class Client:
    """One node that takes part."""

    index: int
    node_id: int
    partition: int | None = None
    num_examples: float | None = None
    online: bool = True
    tasks: int = 0  # sent to it and not answered
    overdue: bool = False  # its slot was given away, as it takes so long
    answered: float = 0.0  # when it last did
    failures: int = 0  # in a row
    silences: int = 0  # in a row: tasks that it let expire
    paused_until: float = 0.0
    host: str = ""  # where it runs, if it told

    def named(self, node_id: int) -> str:
        """Return the client as log lines name it when it is, or was, this node."""
        host = f" on {self.host}" if self.host and node_id == self.node_id else ""
        return f"client {self.index} (node {node_id}{host})"


class Clients:
    """All nodes of a run, by index and by node id.

    A client's index is its place in the order of partition ids, so that a run does not depend on
    Flower's random node ids; nodes that join later get the next free index.

    Parameters
    ----------
    seed : int
        Seed of the sampling.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._clients: list[Client] = []
        self._by_node: dict[int, Client] = {}
        self._by_partition: defaultdict[int, list[Client]] = defaultdict(list)
        self._online: list[int] = []  # indices
        self._sizes: list[float] = []  # num_examples of those who told, in order
        self.num_busy = 0  # those whose slot was given away do not count
        self.waiting: set[int] = set()  # clients whose upload is in the buffer

    def __len__(self) -> int:
        return len(self._online)

    def __getitem__(self, index: int) -> Client:
        return self._clients[index]

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients)

    def restore(self, saved: Iterable[dict[str, Any]], waiting: Iterable[int]) -> None:
        """Know the clients of an interrupted run again; they are offline until they join."""
        names = {item.name for item in fields(Client)}  # earlier checkpoints had others
        for values in saved:
            known = {name: value for name, value in values.items() if name in names}
            self._add(Client(**known | {"online": False, "tasks": 0, "overdue": False}))
        self.waiting = set(waiting)

    def knows(self, node_id: int) -> bool:
        """Return whether this node has taken part before."""
        return node_id in self._by_node

    def by_node(self, node_id: int) -> Client:
        """Return the client with this node id."""
        return self._by_node[node_id]

    @property
    def node_ids(self) -> set[int]:
        """Ids of the nodes that are online."""
        return {self._clients[index].node_id for index in self._online}

    @property
    def num_known(self) -> int:
        """How many clients were ever seen."""
        return len(self._clients)

    def join(
        self,
        node_id: int,
        partition: int | None = None,
        num_examples: float | None = None,
        host: str = "",
    ) -> Client:
        """Add a node, or welcome one back."""
        client = self._by_node.get(node_id) or self._returning(node_id, partition)
        if client is None:
            client = Client(len(self._clients), node_id, partition, num_examples)
            self._add(client)
        client.online = True
        if client.silences:  # what silenced it may be over
            client.silences, client.paused_until = 0, 0.0
        client.host = host or client.host
        # Kept in order of the indices: what is sampled must not depend on who came first.
        insort(self._online, client.index)
        return client

    def _add(self, client: Client) -> None:
        self._clients.append(client)
        self._by_node[client.node_id] = client
        if client.partition is not None:
            self._by_partition[client.partition].append(client)

        if client.num_examples is not None:
            insort(self._sizes, client.num_examples)

    def set_num_examples(self, client: Client, num_examples: float) -> None:
        """Note how much data a client has."""
        if num_examples == client.num_examples:
            return
        if client.num_examples is not None:
            del self._sizes[bisect_left(self._sizes, client.num_examples)]
        client.num_examples = num_examples
        insort(self._sizes, num_examples)

    @property
    def median_num_examples(self) -> float | None:
        """The median of what clients have told of their data; None if too few have."""
        if len(self._sizes) < _FEWEST_SIZES:
            return None
        return self._sizes[(len(self._sizes) - 1) // 2]

    def _returning(self, node_id: int, partition: int | None) -> Client | None:
        """Return the offline client with this partition, under its new node id."""
        if partition is None:
            return None
        for client in self._by_partition[partition]:
            if not client.online:
                del self._by_node[client.node_id]
                client.node_id, client.host = node_id, ""
                self._by_node[node_id] = client
                return client
        return None

    def leave(self, node_id: int) -> Client:
        """Take a node out; a task it still works on stays in flight until it is answered."""
        client = self._by_node[node_id]
        client.online = False
        self._online.remove(client.index)
        return client

    def sample(self, sequence: int, now: float) -> Client | None:
        """Pick the client of task number `sequence`, uniformly from those that may work.

        May work: online, idle and not paused. One whose upload still waits in the buffer is left
        out unless there is no other.
        """
        if not self._online:
            return None
        for attempt in range(_BLIND_DRAWS):
            number = derive(self._seed, "sample", sequence, attempt)
            client = self._clients[self._online[number % len(self._online)]]
            if self._may_work(client, now) and client.index not in self.waiting:
                return client
        eligible = [
            c for c in map(self._clients.__getitem__, self._online) if self._may_work(c, now)
        ]
        eligible = [c for c in eligible if c.index not in self.waiting] or eligible
        if not eligible:
            return None
        return eligible[derive(self._seed, "sample-listed", sequence) % len(eligible)]

    def all_at_work(self, now: float) -> list[Client]:
        """Return those who work in time; none if anybody is idle who could be given a task."""
        online = [self._clients[index] for index in self._online]
        if any(self._may_work(client, now) for client in online):
            return []
        return [c for c in online if c.tasks and not c.overdue and c.paused_until <= now]

    def start_task(self, client: Client) -> None:
        """Note that the client has a task, or one more."""
        client.tasks += 1
        self.num_busy += client.tasks == 1

    def end_task(self, client: Client, *, answered: bool = True) -> None:
        """Note that the client has one task less; one that answered is in time again."""
        before = client.tasks > 0 and not client.overdue
        client.tasks -= 1
        client.overdue = client.overdue and client.tasks > 0 and not answered
        self.num_busy += (client.tasks > 0 and not client.overdue) - before

    def give_slot_away(self, client: Client) -> None:
        """Count the client as busy no longer; it may still answer."""
        client.overdue = True
        self.num_busy -= 1

    def num_left_out(self, now: float, failures: int) -> int:
        """Return how many online clients are left out for now, after at least so many failures."""
        return sum(
            client.paused_until > now and client.failures >= failures
            for client in map(self._clients.__getitem__, self._online)
        )

    @staticmethod
    def _may_work(client: Client, now: float) -> bool:
        return not client.tasks and client.paused_until <= now
