import json
import math
import os
import random

import pytest

from fedpsa_strategy.server.events import Evaluated, NodeLeft, Waiting
from fedpsa_strategy.watch.dashboard.state import PageState
from fedpsa_strategy.watch.event_log import EventLog, complete_size, parse_line, read_events


def test_event_log_writes_one_json_line_per_event(tmp_path):
    with EventLog(tmp_path / "events.jsonl", wall=lambda: 12.3456) as log:
        log(Waiting(time=1.5, reason="nodes"))
        log(Evaluated(time=2.0, version=1, uploads=5, where="server", metrics={"loss": math.nan}))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert isinstance(lines[0].pop("crc32"), int)
    assert lines[0] == {"event": "wait", "time": 1.5, "reason": "nodes", "wall": 12.346}
    assert lines[1]["metrics"] == {"loss": None}


def test_a_full_disk_does_not_stop_the_event_log_and_leaves_no_half_line(tmp_path):
    class FullDisk:
        """A file that takes some bytes and then no more, as a disk that fills up does."""

        def __init__(self, file):
            self.file, self.room = file, 10**9

        def write(self, data):
            taken = self.file.write(data[: self.room])
            self.room -= taken
            if not taken:
                raise OSError(28, "No space left on device")
            return taken

        def __getattr__(self, name):
            return getattr(self.file, name)

    path = tmp_path / "events.jsonl"
    with EventLog(path, wall=lambda: 0.0) as log:
        disk = log._file = FullDisk(log._file)
        log(Waiting(time=1.0, reason="first"))
        disk.room = 20
        log(Waiting(time=2.0, reason="second"))
        log(Waiting(time=3.0, reason="third"))
        assert path.stat().st_size == log.size
        assert len(path.read_text().splitlines()) == 1
        disk.room = 10**9
        log(Waiting(time=4.0, reason="fourth"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["first", "second", "third", "fourth"]


def write_log(path, count=20):
    with EventLog(path, wall=lambda: 0.0) as log:
        for number in range(count):
            log(NodeLeft(time=float(number), node_id=2**60 + number, client=number))
    return path.read_bytes()


def clients(path, **options):
    return [event.client for event in read_events(path, **options)]


def test_every_flipped_bit_costs_its_own_line_and_no_other(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    whole = write_log(path)
    assert clients(path) == list(range(20))
    lines = whole.splitlines(keepends=True)
    chance = random.Random(0)
    for _ in range(500):
        place, bit = chance.randrange(len(whole) - 1), chance.randrange(8)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        number = whole[:place].count(b"\n")
        lost = {number, number + 1} if whole[place] == 10 else {number}
        found = clients(path)
        # Only where the name of the checksum is hit does the line stay readable, and right.
        assert set(range(20)) - set(found) <= lost
        assert found == sorted(set(found))
        assert set(found) <= set(range(20))
    damaged = bytearray(whole)
    damaged[len(lines[0]) + 30] ^= 1
    path.write_bytes(damaged)
    caplog.clear()
    assert clients(path) == [0, *range(2, 20)]
    assert caplog.messages == [f"{path}: damaged lines left out: 2"]


def test_many_damaged_lines_are_one_warning(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.write_bytes(write_log(path, 2) + b"\0\0\n" * 7)
    assert clients(path) == [0, 1]
    assert caplog.messages == [f"{path}: damaged lines left out: 3, 4, 5, 6, 7 and 2 more"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"event": 1, "time": 1.0}',
        b'{"event": "wait", "time": true}',
        b'{"event": "wait", "time": "1"}',
        b'{"event": "wait", "time": 1e999}',
        b'{"event": "wait", "time": 1.0, "crc32": 5}',
    ],
)
def test_what_is_no_event_is_damaged_for_every_reader(line):
    with pytest.raises(ValueError, match=r"."):
        parse_line(line)
    state = PageState()
    state.take(line)
    assert state.damaged == bool(line)


def test_fields_of_the_wrong_kind_are_damage_and_unknown_kinds_are_not(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"event": "leave", "time": 1, "node_id": "x", "client": 0}\n'
        '{"event": "leave", "time": 1, "client": 0}\n'
        '{"event": "of-a-newer-version", "time": 1}\n'
        '{"event": "leave", "time": 1, "node_id": 7, "client": 3, "more": 1}\n'
    )
    assert clients(path) == [3]
    assert caplog.messages == [f"{path}: damaged lines left out: 1, 2"]


def test_wanted_kinds_and_sizes(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    whole = write_log(path)
    size = len(b"".join(whole.splitlines(keepends=True)[:3]))
    assert clients(path, size=size) == [0, 1, 2]
    assert clients(path, size=size + 5) == [0, 1, 2]
    assert list(read_events(path, kinds=["upload"])) == []
    assert not caplog.messages
    assert list(read_events(tmp_path / "none")) == []
    assert caplog.messages == [f"{tmp_path}/none is missing: its events are lost"]


def test_a_log_that_was_cut_short_goes_on_after_its_last_complete_line(tmp_path):
    path = tmp_path / "events.jsonl"
    whole = write_log(path, 3)
    path.write_bytes(whole[:-10])
    kept = len(b"".join(whole.splitlines(keepends=True)[:2]))
    assert complete_size(path, len(whole)) == kept
    with EventLog(path, keep=len(whole)) as log:
        assert log.size == kept
        log(Waiting(time=5.0, reason="on"))
    assert b"\0" not in path.read_bytes()
    assert [event.kind for event in read_events(path)] == ["leave", "leave", "wait"]
    path.write_bytes(b"x" * 10_000)
    assert complete_size(path, 10_000) == 0


def test_a_log_is_on_the_disk_before_it_is_counted(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with EventLog(tmp_path / "events.jsonl") as log:
        log(Waiting(time=1.0, reason="x"))
        assert not synced
        assert log.sync() == log.size == (tmp_path / "events.jsonl").stat().st_size
        assert len(synced) == 1


def test_a_fifo_does_not_hang_readers(tmp_path):
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not an ordinary file"):
        list(read_events(path))
    with pytest.raises(OSError, match="not an ordinary file"):
        EventLog(path)
