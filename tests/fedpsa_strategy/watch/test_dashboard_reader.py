"""What the dashboard reads from a run's folder, and how it bears folders that are not in order."""

import json
import math
import os
import time

import pytest

from fedpsa_strategy.server import events
from fedpsa_strategy.watch import tail as tail_module
from fedpsa_strategy.watch.dashboard.library import Library, Run
from fedpsa_strategy.watch.dashboard.series import Series
from fedpsa_strategy.watch.dashboard.state import PageState
from fedpsa_strategy.watch.event_log import EventLog
from fedpsa_strategy.watch.runs import NotARunError
from fedpsa_strategy.watch.tail import Tail
from support.events import (
    LAST_NODE,
    aggregated,
    dispatched,
    ended,
    evaluated,
    joined,
    node,
    rejected,
    started,
    uploaded,
)


def lines_of(*items, wall=1000.0):
    return [
        json.dumps(item.to_dict() | {"wall": wall + item.time}).encode() + b"\n" for item in items
    ]


def state_of(*items):
    state = PageState()
    for line in lines_of(*items):
        state.take(line)
    return state


# --- The growing file ---------------------------------------------------------------------------


def test_only_new_and_complete_lines_are_read(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read() == (False, [])  # not there yet
    path.write_bytes(b"one\ntw")
    assert tail.read() == (False, [b"one"])
    assert tail.read() == (False, [])
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.read() == (False, [b"two", b"three"])
    assert tail.offset == path.stat().st_size


@pytest.mark.parametrize("content", [b"", b"on", b"other\n", b"one\nTWO\nthree and more\n"])
def test_a_file_that_shrank_or_was_replaced_is_read_anew(tmp_path, content):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    path.write_bytes(content)
    restarted, lines = tail.read()
    assert restarted
    assert lines == content.splitlines()[: content.count(b"\n")]
    assert tail.restarts == 1


def test_a_file_that_vanished_is_waited_for(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    tail.read()
    path.unlink()
    assert tail.read() == (True, [])
    assert tail.read() == (False, [])
    path.write_bytes(b"two\n")
    assert tail.read() == (False, [b"two"])


def test_long_files_come_in_pieces_and_endless_lines_do_not_block(tmp_path, monkeypatch):
    monkeypatch.setattr(tail_module, "CHUNK", 16)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"0123456789\n" * 3 + b"x" * 40 + b"\nend\n")
    tail, lines = Tail(path), []
    while piece := tail.read()[1]:
        lines += piece
    assert lines[:3] == [b"0123456789"] * 3
    assert b"".join(lines[3:-1]) == b"x" * 40
    assert lines[-1] == b"end"


# --- Curves -------------------------------------------------------------------------------------


def test_curves_keep_mean_extremes_and_end_however_long_they_get():
    series = Series(limit=100)
    values = [math.sin(i / 500) + (5.0 if i == 7777 else 0.0) for i in range(20_011)]
    for i, value in enumerate(values):
        series.add(float(i), 0.5 * i, i + 1, value)
    rows = series.rows()
    assert 50 <= len(rows) <= 100
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert rows[-1][:3] == [20_010.0, 10_005.0, 20_011]
    assert max(row[5] for row in rows) == pytest.approx(max(values), rel=1e-5)
    assert min(row[4] for row in rows) == pytest.approx(min(values), rel=1e-5)
    counts = [point.count for point in series.points]
    assert sum(counts) == len(values)
    mean = sum(row[3] * count for row, count in zip(rows, counts, strict=True)) / len(values)
    assert mean == pytest.approx(sum(values) / len(values), abs=1e-4)


# --- What events add up to ----------------------------------------------------------------------


def test_events_add_up():
    state = state_of(
        events.Waiting(time=0.0, reason="1 of 4 nodes connected"),
        *map(joined, range(4)),
        started(),
        evaluated(0.0, accuracy=0.125, loss=1.0),
        dispatched(0.0, 0),
        dispatched(0.0, 1),
        uploaded(10.0, 0, staleness=0, kappa=0.5),
        uploaded(20.0, 1, staleness=3, kappa=0.75, temperature=2.5),
        aggregated(20.0, 1, 2, weights=[0.25, 0.75], effective_number=1.8),
        evaluated(20.0, accuracy=0.75, loss=1.0),
        evaluated(20.0, accuracy=0.625, loss=1.0),
        evaluated(20.0, accuracy=0.5, loss=1.0, where="clients"),
        dispatched(20.0, 2, version=1),
        uploaded(30.0, 3, kappa=0.5),
        rejected(35.0, 1),
        events.Quarantined(time=35.0, client=1, node_id=LAST_NODE - 1, failures=3, until=99.0),
        events.NodeLeft(time=40.0, node_id=LAST_NODE, client=0),
        rejected(40.0, 0, "left"),
        ended(40.0, version=1, uploads=3, rejected=2),
    )
    snapshot = state.snapshot()
    assert state.damaged == 0
    assert snapshot["totals"] == {
        "accuracy": 0.625,
        "best_accuracy": 0.75,
        "loss": 1.0,
        "temperature": None,
        "effective_number": 1.8,
        "privacy": {},
        "version": 1,
        "uploads": 3,
        "rejected": 2,
        "quarantines": 1,
        "tasks": 3,
        "bytes_up": 300,
        "bytes_down": 120,
        "kappa": pytest.approx(1.75 / 3),
        "staleness": 1.0,
        "uploads_per_second": pytest.approx(3 / 40),
    }
    assert snapshot["elapsed"] == 40.0
    assert snapshot["end_reason"] == "enough"
    assert snapshot["series"]["accuracy"][1] == [20.0, 20.0, 2, 0.75, 0.75, 0.75]
    assert snapshot["series"]["client_accuracy"] == [[20.0, 20.0, 2, 0.5, 0.5, 0.5]]
    assert [row[3] for row in snapshot["series"]["temperature"]] == [2.5]
    assert snapshot["staleness"] == {"width": 1, "counts": [2, 0, 0, 1]}
    assert snapshot["buffers"] == [
        {
            "version": 1,
            "time": 20.0,
            "size": 2,
            "effective_number": 1.8,
            "weights": [0.25, 0.75],
            "clients": [0, 1],
            "kappas": [0.5, 0.75],
        }
    ]
    rows = {row["client"]: row for row in snapshot["clients"]["rows"]}
    states = {client: row["state"] for client, row in rows.items()}
    assert states == {0: "offline", 1: "paused", 2: "busy", 3: "buffered"}
    assert (rows[2]["since"], rows[2]["version"]) == (20.0, 1)
    assert (rows[1]["until"], rows[1]["failures"]) == (99.0, 3)
    assert rows[1]["reason"] == "no reply"
    assert rows[1]["node_id"] == str(LAST_NODE - 1)
    assert snapshot["clients"]["counts"]["busy"] == 1
    assert snapshot["reasons"] == [("no reply", 1), ("left", 1)]
    assert snapshot["rejections"][1]["node_id"] == str(LAST_NODE - 1)


def test_a_client_has_the_name_of_its_machine():
    joined = [
        events.NodeJoined(
            time=0.0, node_id=LAST_NODE - i, client=i, partition=i, num_examples=1.0, host=host
        )
        for i, host in enumerate(["lab-3", ""])
    ]
    state = state_of(*joined, started(), dispatched(1.0, 0), rejected(2.0, 0), rejected(3.0, 1))
    assert [row["host"] for row in state.snapshot()["clients"]["rows"]] == ["lab-3", ""]
    assert [item["host"] for item in state.snapshot()["rejections"]] == ["", "lab-3"]


def test_a_quarantine_ends_with_time():
    paused = events.Quarantined(time=1.0, client=0, node_id=LAST_NODE, failures=3, until=5.0)
    state = state_of(paused, events.Waiting(time=5.0, reason="x"))
    assert state.snapshot()["clients"]["counts"] == {"idle": 1}


def test_a_reply_without_a_task_is_counted_but_makes_no_client():
    state = state_of(rejected(1.0, -1))
    assert state.snapshot()["totals"]["rejected"] == 1
    assert state.clients == {}


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1, 2]",
        b"null",
        b'{"event": "upload"}',
        b'{"event": "upload", "time": "soon"}',
        b'{"event": "upload", "time": 1e999}',
        b'{"event": "upload", "time": NaN}',
        b'{"event": ["x"], "time": 1.0}',
        b'{"event": "evaluate", "time": 1.0, "where": "server", "metrics": {"accuracy": NaN}}',
        b'{"event": "evaluate", "time": 1.0, "where": "server", "metrics": null}',
        b'{"event": "reject", "time": 1.0, "client": 1.5, "node_id": 1, "reason": "x"}',
        b'{"event": "aggregate", "time": 1, "version": 1, "uploads": 1, "report": {"weights": 3}}',
        b'{"event": "wait", "time": 1.0, "reason": {"no": "text"}}',
        b'{"event": "upl{"event": "start"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"event": "wait", "time": 1' + b"0" * 400 + b', "reason": "x"}',
    ],
    ids=range(17),
)
def test_damaged_lines_are_counted_and_skipped(line):
    state = state_of(started(), uploaded(1.0, 0, kappa=0.5))
    before = state.snapshot()
    state.take(line)
    after = state.snapshot()
    assert after["damaged"] == 1
    for key in ("totals", "series", "clients", "rejections", "buffers"):
        assert after[key] == before[key]
    json.dumps(after, allow_nan=False)


def test_every_kind_of_event_changes_what_is_shown():
    where = node(0)
    items = [
        joined(0, 1.0),
        started(1.0),
        dispatched(1.0, 0),
        uploaded(1.0, 0, kappa=0.5),
        aggregated(1.0, 1, 1, weights=[1.0]),
        evaluated(1.0, accuracy=0.5, loss=1.0),
        rejected(1.0, 0),
        events.Resent(time=1.0, sequence=1, version=1, **where),
        events.Overdue(time=1.0, sequence=1, version=1, waited=40.0, limit=30.0, **where),
        events.Quarantined(time=1.0, failures=3, until=5.0, **where),
        events.NodeLeft(time=1.0, **where),
        events.Waiting(time=1.0, reason="nodes"),
        ended(1.0, version=1, uploads=1, rejected=1),
    ]
    assert {type(item) for item in items} == set(events.KINDS.values())
    state = state_of(evaluated(1.0, accuracy=0.25, loss=1.0))
    for item, line in zip(items, lines_of(*items), strict=True):
        before = state.snapshot()
        state.take(line)
        assert state.snapshot() != before, item


def test_what_privacy_is_spent_is_shown():
    state = PageState()
    spent = {"epsilon": 2.5, "delta": 1e-5, "epsilon_bound": 8.0, "participations": 3}
    for report in ({"epsilon": 1.0}, spent, spent | {"epsilon": None}, {"epsilon": "much"}):
        for line in lines_of(events.Aggregated(time=1.0, version=1, uploads=2, report=report)):
            state.take(line)
    assert state.damaged == 0
    assert state.snapshot()["totals"]["privacy"] == spent
    assert PageState().snapshot()["totals"]["privacy"] == {}


def test_who_is_overdue_is_shown_until_it_answers():
    where = node(0)
    overdue = events.Overdue(time=50.0, sequence=0, version=0, waited=40.0, limit=30.0, **where)
    begun = [joined(0, 1.0), started(1.0)]
    state = state_of(*begun, dispatched(10.0, 0), overdue)
    clients = state.snapshot()["clients"]
    assert clients["counts"] == {"overdue": 1}
    assert clients["rows"][0]["since"] == 10.0
    for end in (uploaded(60.0, 0, kappa=0.5), rejected(60.0, 0)):
        (line,) = lines_of(end)
        state = state_of(*begun, dispatched(10.0, 0), overdue)
        state.take(line)
        assert "overdue" not in state.snapshot()["clients"]["counts"]
        (line,) = lines_of(dispatched(61.0, 0))
        state.take(line)
        assert state.snapshot()["clients"]["counts"] == {"busy": 1}


def test_unknown_kinds_and_empty_lines_are_no_damage():
    state = PageState()
    state.take(b'{"event": "something new", "time": 1.0}')
    state.take(b"\r")
    assert state.damaged == 0


def test_events_without_wall_time_have_no_speed():
    state = PageState()
    for item in (started(), uploaded(1.0, 0, kappa=0.5), uploaded(2.0, 1, kappa=0.5)):
        state.take(json.dumps(item.to_dict()).encode())
    snapshot = state.snapshot()
    assert snapshot["elapsed"] is None
    assert snapshot["totals"]["uploads_per_second"] is None
    assert snapshot["totals"]["uploads"] == 2


def test_a_run_that_goes_on_in_the_same_file_repeats_what_came_after_the_checkpoint():
    state = state_of(
        started(),
        evaluated(10.0, accuracy=0.5, loss=1.0),
        aggregated(10.0, 1, 2, weights=[0.5, 0.5]),
        dispatched(10.0, 0),
        uploaded(15.0, 1, kappa=0.5),
        evaluated(20.0, accuracy=0.9, loss=1.0),
    )
    resumed = [
        events.Waiting(time=10.0, reason="0 of 4 nodes connected"),
        started(time=10.0, version=1),
        uploaded(15.0, 1, kappa=0.5),
        evaluated(20.0, accuracy=0.75, loss=1.0),
    ]
    for line in lines_of(*resumed, wall=90_000.0):  # the next day
        state.take(line)
    snapshot = state.snapshot()
    assert [row[0] for row in snapshot["series"]["accuracy"]] == [10.0, 20.0]
    assert snapshot["totals"]["accuracy"] == 0.75
    assert snapshot["elapsed"] == 30.0  # 20 s, and 10 s more
    assert "busy" not in snapshot["clients"]["counts"]


def test_a_resumed_run_has_the_numbers_of_one_that_was_never_interrupted():
    before = [
        *map(joined, range(3)),
        started(),
        dispatched(0.0, 0),
        dispatched(0.0, 1),
        uploaded(5.0, 0, kappa=0.25),
        dispatched(5.0, 2),
        rejected(8.0, 2),
    ]
    # The next day, on an engine whose nodes have other ids; the file was cut at the checkpoint.
    joins = [
        events.NodeJoined(time=8, node_id=77 + i, client=i, partition=i, num_examples=1)
        for i in range(3)
    ]
    again = started(8.0, num_clients=3, uploads=1, rejected=1)
    resent = events.Resent(time=8.0, sequence=1, client=1, node_id=78, version=0)
    state = state_of(*before)
    for line in lines_of(*joins, again, resent, wall=90_000.0):
        state.take(line)
    snapshot = state.snapshot()
    rows = {row["client"]: row for row in snapshot["clients"]["rows"]}
    assert {client: row["state"] for client, row in rows.items()} == {
        0: "buffered",
        1: "busy",
        2: "idle",
    }
    assert (rows[1]["since"], rows[1]["node_id"]) == (0.0, "78")
    for line in lines_of(
        uploaded(10.0, 1, kappa=0.75),
        aggregated(10.0, 1, 2, weights=[0.4, 0.6]),
        wall=90_000.0,
    ):
        state.take(line)
    snapshot = state.snapshot()
    assert snapshot["buffers"][0]["clients"] == [0, 1]
    assert snapshot["buffers"][0]["kappas"] == [0.25, 0.75]
    totals = snapshot["totals"]
    assert (totals["uploads"], totals["rejected"], totals["version"]) == (2, 1, 1)
    assert (totals["bytes_up"], totals["bytes_down"]) == (200, 120)
    assert snapshot["elapsed"] == 10.0
    assert totals["uploads_per_second"] == pytest.approx(2 / 10)


def test_a_run_resumed_in_a_file_of_its_own_knows_what_was_before():
    state = state_of(started(time=8.0, version=3, uploads=15), uploaded(10.0, 1, kappa=0.5))
    totals = state.snapshot()["totals"]
    assert (totals["version"], totals["uploads"]) == (3, 16)
    assert totals["uploads_per_second"] == pytest.approx(1 / 2)


def test_what_the_page_gets_is_bounded():
    state = PageState()
    for i in range(3000):
        for line in lines_of(
            dispatched(float(i), i),
            uploaded(float(i), i, staleness=i, kappa=0.5),
            rejected(float(i), i, f"{i}" * 99),
        ):
            state.take(line)
        if i % 100 == 99:
            state.take(lines_of(aggregated(float(i), i, i, weights=[0.01] * 100))[0])
    snapshot = state.snapshot()
    assert len(snapshot["clients"]["rows"]) <= 600
    assert sum(snapshot["clients"]["counts"].values()) == 3000
    assert len(snapshot["staleness"]["counts"]) <= 64
    assert sum(snapshot["staleness"]["counts"]) == 3000
    assert len(snapshot["reasons"]) <= 20
    assert len(snapshot["buffers"][0]["weights"]) == 64
    assert len(json.dumps(snapshot)) < 300_000


# --- A run's folder -----------------------------------------------------------------------------


def write_run(path, *items, config='strategy = "fedpsa"\nclock = "virtual"\nseed = 9\n'):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(config)
    with EventLog(path / "events.jsonl") as log:
        for item in items:
            log(item)
    return path


def test_a_snapshot_is_sent_once_until_something_changes(tmp_path):
    run = Run(write_run(tmp_path / "run", started()))
    first = run.snapshot()
    assert first["status"] == "running"
    assert run.snapshot(first["cursor"]) is None
    with EventLog(run.path / "events.jsonl") as log:
        log(uploaded(1.0, 0, kappa=0.5))
    second = run.snapshot(first["cursor"])
    assert second["totals"]["uploads"] == 1
    assert run.snapshot(first["cursor"]) is not None
    assert run.snapshot(second["cursor"]) is None


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ('strategy = "midpoint"\n', "Midpoint"),
        ('strategy = "fedbuff"\nstaleness-exponent = 0.0\n', "Uniform"),
        ('strategy = "fedbuff"\nstaleness-exponent = 0.5\n', "FedBuff"),
        ('strategy = "not_installed_here:Method"\n', "not_installed_here:Method"),
        ("", ""),
    ],
)
def test_a_run_says_its_method_as_tables_do(tmp_path, config, label):
    assert Run(write_run(tmp_path / "run", started(), config=config)).head()["label"] == label


def test_a_replaced_file_starts_from_nothing(tmp_path):
    run = Run(
        write_run(
            tmp_path / "run", started(), uploaded(1.0, 0, kappa=0.5), uploaded(2.0, 1, kappa=0.5)
        )
    )
    assert run.snapshot()["totals"]["uploads"] == 2
    write_run(tmp_path / "new", started(), uploaded(1.5, 0, kappa=0.5))
    (tmp_path / "new/events.jsonl").replace(run.path / "events.jsonl")
    snapshot = run.snapshot()
    assert snapshot["totals"]["uploads"] == 1
    assert snapshot["time"] == 1.5


def test_status_follows_events_summary_and_silence(tmp_path):
    now = time.time()
    run = Run(tmp_path / "run", now=lambda: now)
    run.path.mkdir()
    assert run.head()["status"] == "waiting"
    write_run(run.path, started())
    assert run.head()["status"] == "running"
    now += 60
    assert run.head()["status"] == "silent"
    (run.path / "summary.json").write_text('{"status": "failed", "error": "disk full"}')
    assert run.head()["status"] == "failed"
    assert run.snapshot()["error"] == "disk full"
    now += 60  # resumed: events go on, the summary is that of before
    with EventLog(run.path / "events.jsonl") as log:
        log(started(5.0, version=1))
    os.utime(run.path / "events.jsonl", (now, now))
    assert run.head()["status"] == "running"
    (run.path / "summary.json").write_text('{"status": "completed", "accuracy": 0.5}')
    os.utime(run.path / "summary.json", (now - 2, now - 2))  # a folder that was just copied
    head = run.head()
    assert (head["status"], head["accuracy"], head["loss"]) == ("completed", 0.5, None)
    (run.path / "summary.json").write_text('{"status": "completed", "loss": 0.25}')
    assert (run.head()["accuracy"], run.head()["loss"]) == (None, 0.25)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", b"strategy = "),
        ("config.toml", b"\xff\xff"),
        ("config.toml", b"virtual-days = nan\nclock = 'virtual'\nwhen = 2026-01-01"),
        ("config.toml", b"virtual-days = 'x'\nclock = 'virtual'"),
        ("summary.json", b'{"status": '),
        ("summary.json", b"[1]"),
        ("summary.json", b'{"status": "completed", "accuracy": NaN, "x": 1e999}'),
        ("events.jsonl", b'{"event": "end"'),
    ],
)
def test_damaged_files_do_not_stop_the_dashboard(tmp_path, name, content):
    run = Run(write_run(tmp_path / "run", started(), uploaded(1.0, 0, kappa=0.5)))
    (run.path / name).write_bytes(content)
    json.dumps(run.snapshot(), allow_nan=False)


@pytest.mark.parametrize("name", ["events.jsonl", "summary.json", "config.toml"])
def test_a_pipe_does_not_hang_the_dashboard(tmp_path, name):
    (tmp_path / "engine-logs").mkdir()
    os.mkfifo(tmp_path / name)
    snapshot = Run(tmp_path).snapshot()
    expected = "events.jsonl cannot be read: it is not an ordinary file"
    assert snapshot["problem"] == (expected if name == "events.jsonl" else None)
    assert len(Library([tmp_path]).runs()) == 1


def test_an_unreadable_events_file_is_reported(tmp_path):
    (tmp_path / "events.jsonl").mkdir()
    assert "events.jsonl cannot be read" in Run(tmp_path).snapshot()["problem"]


def test_settings_are_texts(tmp_path):
    config = f'clock = "virtual"\nseed = {2**63 - 1}\nthermometer = true\n'
    snapshot = Run(write_run(tmp_path / "run", started(), config=config)).snapshot()
    assert snapshot["config"]["seed"] == snapshot["seed"] == "9223372036854775807"
    assert snapshot["config"]["thermometer"] == "true"


def test_a_long_run_is_read_once_and_stays_small(tmp_path, monkeypatch):
    task, reply = (
        dispatched(0.0, 3).to_dict(),
        uploaded(0.0, 3, temperature=1.0, kappa=0.5).to_dict(),
    )
    version = aggregated(0.0, 1, 5, weights=[0.2] * 5).to_dict()
    items = [started().to_dict() | {"wall": 0.0}]
    for i in range(1, 27_001):
        moment = {"time": float(i), "wall": i / 30}
        items += [task | moment, reply | moment]
        if i % 5 == 0:
            items.append(version | moment | {"version": i // 5, "uploads": i})
    assert len(items) > 59_000
    path = tmp_path / "run"
    path.mkdir()
    (path / "events.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    run = Run(path)
    taken = []
    take = run.state.take
    monkeypatch.setattr(run.state, "take", lambda line: (taken.append(len(line)), take(line)))
    snapshot = run.snapshot()
    while snapshot["unread"]:  # a busy machine shows it in parts
        snapshot = run.snapshot()
    assert snapshot["totals"]["uploads"] == 27_000
    assert len(json.dumps(snapshot)) < 250_000
    assert run.snapshot(snapshot["cursor"]) is None
    assert len(taken) == len(items)  # each line once, however often the page asks


def test_reading_stops_after_a_while_and_goes_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr(tail_module, "CHUNK", 4096)
    monkeypatch.setattr("fedpsa_strategy.watch.dashboard.library._PATIENCE", 0.0)
    run = Run(
        write_run(
            tmp_path / "run", started(), *(uploaded(float(i), 0, kappa=0.5) for i in range(100))
        )
    )
    shares, snapshot = [], run.snapshot()
    while snapshot["unread"]:
        shares.append(snapshot["unread"])
        snapshot = run.snapshot(snapshot["cursor"])
    assert len(shares) > 3
    assert shares == sorted(shares, reverse=True)
    assert snapshot["totals"]["uploads"] == 100


# --- Folders of runs ----------------------------------------------------------------------------


def test_a_folder_of_runs_shows_all_and_those_that_come(tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "a", started())
    (runs / "notes").mkdir()
    (runs / "readme.txt").write_text("x")
    library = Library([runs])
    assert list(library.runs()) == ["a"]
    (runs / "b/engine-logs").mkdir(parents=True)  # the first thing a simulated run makes
    for name, file, text in (
        ("c", "config.toml", "run-dir = ''"),  # waits for its nodes
        ("d", "summary.json", '{"status": "failed", "error": "unknown setting"}'),
    ):
        (runs / name).mkdir()
        (runs / name / file).write_text(text)
    assert set(library.runs()) == {"a", "b", "c", "d"}
    assert library.runs()["d"].snapshot()["error"] == "unknown setting"
    assert library.runs()["a"] is library.runs()["a"]


def test_names_that_occur_twice_are_numbered(tmp_path):
    folders = [write_run(tmp_path / parent / "run", started()) for parent in "xyz"]
    runs = Library([*folders, folders[0]]).runs()
    assert {name: run.path for name, run in runs.items()} == {
        "run": folders[0],
        "run~2": folders[1],
        "run~3": folders[2],
    }


def test_an_empty_folder_is_watched(tmp_path):
    library = Library([tmp_path])
    assert library.runs() == {}
    write_run(tmp_path / "first", started())
    assert list(library.runs()) == ["first"]


def test_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(NotARunError, match="is no folder"):
        Library([tmp_path / "missing"])
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool/config.toml").write_text("colour = 'blue'")
    with pytest.raises(NotARunError, match=r"is no run: .*events.jsonl"):
        Library([tmp_path])
    (tmp_path / "cells/one/engine-logs").mkdir(parents=True)
    with pytest.raises(NotARunError, match=r"but there are runs in .*cells"):
        Library([tmp_path])
