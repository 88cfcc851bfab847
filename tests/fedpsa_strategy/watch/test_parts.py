"""A log of events in several files reads as one."""

import random
from pathlib import Path

import pytest

from fedpsa_strategy.server.events import NodeLeft
from fedpsa_strategy.watch.dashboard.library import Run
from fedpsa_strategy.watch.event_log import EventLog, complete_size, read_events
from fedpsa_strategy.watch.parts import parts_of
from fedpsa_strategy.watch.tail import Tail


def write(path, numbers, keep=0, part_size=0):
    with EventLog(path, keep, wall=lambda: 0.0, part_size=part_size) as log:
        for number in numbers:
            log(NodeLeft(time=float(number), node_id=1, client=number))
        return log.size


def clients(path, **options):
    return [event.client for event in read_events(path, **options)]


@pytest.fixture
def logs(tmp_path):
    """The same events in one file and in parts."""
    one, many = tmp_path / "one" / "events.jsonl", tmp_path / "many" / "events.jsonl"
    for path in (one, many):
        path.parent.mkdir()
    sizes = write(one, range(100)), write(many, range(100), part_size=1000)
    assert sizes[0] == sizes[1]
    assert len(parts_of(many)) > 5
    return one, many


def test_full_parts_are_named_by_what_came_before_them(logs):
    one, many = logs
    whole = one.read_bytes()
    for part in parts_of(many):
        assert part.path.read_bytes() == whole[part.start : part.end]
        if part.path != many:
            assert part.path.name == f"events-{part.start:012d}.jsonl"
            assert 1000 <= part.size < 1200
    assert b"".join(part.path.read_bytes() for part in parts_of(many)) == whole


def test_positions_are_those_of_one_file(logs):
    one, many = logs
    chance = random.Random(0)
    size = one.stat().st_size
    for limit in [0, 1, size, size + 9, *(chance.randrange(size) for _ in range(200))]:
        assert complete_size(many, limit) == complete_size(one, limit)
        assert clients(many, size=limit) == clients(one, size=limit)


def test_a_resume_cuts_off_what_came_after_its_checkpoint(tmp_path):
    chance = random.Random(1)
    whole = tmp_path / "whole.jsonl"
    write(whole, range(60))
    content = whole.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10)]
    for number in range(40):
        path = tmp_path / str(number) / "events.jsonl"
        path.parent.mkdir()
        write(path, range(60), part_size=700)
        kept = chance.randrange(61)
        keep = ends[kept] + (chance.randrange(5) if kept < 60 else 0)  # or in the middle of a line
        write(path, range(kept, 80), keep, part_size=700)
        assert clients(path) == list(range(80))
        starts = [part.start for part in parts_of(path)]
        assert starts == sorted(set(starts))


def test_a_tail_follows_the_log_through_its_parts(tmp_path):
    path = tmp_path / "events.jsonl"
    tail, seen, restarts = Tail(path), [], 0
    chance = random.Random(2)
    with EventLog(path, wall=lambda: 0.0, part_size=500) as log:
        for number in range(300):
            log(NodeLeft(time=float(number), node_id=1, client=number))
            if chance.random() < 0.2:
                while True:
                    restarted, lines = tail.read()
                    restarts += restarted
                    seen += lines
                    if not lines:
                        break
                assert tail.unread == 0
    while (found := tail.read())[1]:
        seen += found[1]
    assert restarts == 0
    whole = b"".join(part.path.read_bytes() for part in parts_of(path))
    assert seen == whole.splitlines()
    # A resumed run cut the log off: the reader begins anew.
    write(path, [7], keep=100)
    assert tail.read() == (True, path.read_bytes().splitlines())


def test_the_oldest_parts_may_be_taken_away(logs):
    one, many = logs
    first, second, *_ = parts_of(many)
    first.path.unlink()
    left = clients(many)
    assert left == clients(one)[-len(left) :]
    assert complete_size(many, 10**9) == one.stat().st_size
    tail = Tail(many)
    assert tail.read()[1][0] == second.path.read_bytes().splitlines()[0]
    write(many, range(100, 110), keep=10**9, part_size=1000)
    assert clients(many) == [*left, *range(100, 110)]


def test_the_live_page_shows_all_parts(logs):
    one, many = (Run(path.parent).snapshot() for path in logs)
    assert one["clients"] == many["clients"]
    assert (many["problem"], many["unread"]) == (None, 0)


def test_events_go_on_in_one_file_if_no_other_can_be_made(tmp_path, monkeypatch, caplog):
    path = tmp_path / "events.jsonl"

    def refuse(self, target):
        raise PermissionError(1, "Operation not permitted")

    with EventLog(path, wall=lambda: 0.0, part_size=200) as log:
        log(NodeLeft(time=0.0, node_id=1, client=0))
        monkeypatch.setattr(Path, "rename", refuse)
        for number in range(1, 20):
            log(NodeLeft(time=0.0, node_id=1, client=number))
    assert clients(path) == list(range(20))
    assert caplog.text.count("the events continue in one file") == 1
