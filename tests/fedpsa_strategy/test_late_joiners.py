"""Nodes that join a run later are asked for their partition and size as the first ones are."""

from flwr.app import Error, MessageType

from fedpsa_strategy import FedBuff
from fedpsa_strategy.server.options import Failures, Limits
from support.grids import DecodingGrid, ScriptedGrid, update
from support.runs import recorded

ASKING = Failures(query_timeout=20.0)


def sent(grid, node):
    """Return the kinds of the messages that a node was sent."""
    return [m.metadata.message_type for m in grid.sent if m.metadata.dst_node_id == node]


def going(grid, joined, seconds=120.0, failures=ASKING, **kwargs):
    """Run while `joined(now)` says who is connected."""
    grid.get_node_ids = lambda: joined(grid.time.now)
    strategy = FedBuff(
        buffer_size=4, max_in_flight=4, failures=failures, limits=Limits(deadline=seconds), **kwargs
    )
    recorder = recorded(strategy, grid, num_versions=10**6)
    return strategy, recorder


def test_a_node_that_joins_later_tells_its_partition_and_size_before_it_trains():
    grid = ScriptedGrid(3, delay=2.0)
    partitions = {1000: 0, 1007: 1, 5: 2}
    grid.partition_of = partitions.get
    strategy, recorder = going(grid, lambda now: [1007, 1000] if now < 30 else [1007, 1000, 5])
    (late,) = [event for event in recorder.of("join") if event.time > 1]
    assert (late.node_id, late.partition, late.num_examples, late.client) == (5, 2, 10, 2)
    assert 30 < late.time < 40
    first, *others = sent(grid, 5)
    assert first == MessageType.QUERY
    assert set(others) == {MessageType.TRAIN}
    assert strategy.state.clients.by_node(5).partition == 2


def test_one_that_comes_back_under_another_id_is_the_same_client():
    grid = ScriptedGrid(3, delay=2.0)
    grid.partition_of = {1000: 0, 1007: 1, 5: 1}.get
    _, recorder = going(
        grid, lambda now: [1000, 1007] if now < 30 else [1000] if now < 60 else [1000, 5]
    )
    (left,) = recorder.of("leave")
    back = recorder.of("join")[-1]
    assert (left.node_id, left.client) == (1007, 1)
    assert (back.node_id, back.client, back.partition) == (5, 1, 1)


def test_who_was_here_under_the_same_id_is_not_asked_again():
    grid = ScriptedGrid(2, delay=2.0)
    _, recorder = going(grid, lambda now: [1000, 1007] if not 30 < now < 60 else [1000])
    assert sent(grid, 1007).count(MessageType.QUERY) == 1
    assert [event.node_id for event in recorder.of("join")] == [1000, 1007, 1007]


def test_one_that_does_not_answer_takes_part_all_the_same():
    grid = ScriptedGrid(2)
    grid.delay = lambda m: (
        1e9 if m.metadata.dst_node_id == 5 and m.metadata.message_type == MessageType.QUERY else 2.0
    )
    _, recorder = going(grid, lambda now: [1000, 1007] if now < 30 else [1000, 1007, 5])
    late = recorder.of("join")[-1]
    assert (late.node_id, late.partition) == (5, None)
    assert 50 < late.time < 60
    assert MessageType.TRAIN in sent(grid, 5)


def test_nor_is_an_error_or_a_refused_message_an_obstacle():
    grid = ScriptedGrid(2, delay=2.0)
    grid.partition_of = lambda node: None if node == 5 else 0
    grid.refuse_push = lambda m: (
        m.metadata.dst_node_id == 6 and m.metadata.message_type == MessageType.QUERY
    )
    _, recorder = going(grid, lambda now: [1000] if now < 30 else [1000, 5, 6])
    assert {event.node_id for event in recorder.of("join")} == {1000, 5, 6}
    assert MessageType.TRAIN in sent(grid, 5)
    assert MessageType.TRAIN in sent(grid, 6)


def test_an_answer_that_cannot_be_read_loses_no_other():
    grid = DecodingGrid(2, delay=2.0, unreadable_query=lambda node: node == 5)
    grid.partition_of = {1000: 0, 1007: 1, 5: 2, 6: 3}.get
    _, recorder = going(grid, lambda now: [1000, 1007] if now < 30 else [1000, 1007, 5, 6])
    joined = {event.node_id: event.partition for event in recorder.of("join")}
    assert joined == {1000: 0, 1007: 1, 5: None, 6: 3}


def test_where_nobody_is_asked_they_join_at_once():
    grid = ScriptedGrid(2, delay=2.0)
    grid.behaviour = lambda m: (
        Error(code=2, reason="no query function")
        if m.metadata.message_type == MessageType.QUERY
        else update()
    )
    going(grid, lambda now: [1000] if now < 30 else [1000, 5], failures=Failures())
    assert MessageType.QUERY not in sent(grid, 5)
    assert MessageType.TRAIN in sent(grid, 5)
