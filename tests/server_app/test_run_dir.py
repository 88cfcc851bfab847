import json
import math
import tomllib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from safetensors.numpy import load_file

from fedpsa_strategy.events import Evaluated, Waiting
from server_app.run_dir import EventLog, RunDir, model_sha256


def arrays(value=1.0):
    return ArrayRecord({"w": Array(np.full((2, 2), value, np.float32)), "n": Array(np.asarray(3))})


def test_files_are_whole_and_readable(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.write_config({"lr": 0.1, "dataset": "digits", "thermometer": True})
    run_dir.write_summary({"accuracy": 0.5, "loss": math.nan, "nested": {"x": [math.inf, 1.0]}})
    run_dir.write_model(arrays())
    config = tomllib.loads((run_dir.path / "config.toml").read_text())
    assert config == {"lr": 0.1, "dataset": "digits", "thermometer": True}
    summary = json.loads((run_dir.path / "summary.json").read_text())
    assert summary == {"accuracy": 0.5, "loss": None, "nested": {"x": [None, 1.0]}}
    loaded = load_file(run_dir.path / "model.safetensors")
    assert loaded["w"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert loaded["n"] == 3
    assert sorted(path.name for path in run_dir.path.iterdir()) == [
        "config.toml",
        "model.safetensors",
        "summary.json",
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path)
    run_dir.write("x", b"old")

    def broken(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="No space"):
        run_dir.write("x", b"new and longer")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_with_a_run_is_refused(tmp_path):
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(FileExistsError, match="already holds a run"):
        RunDir(tmp_path)


def test_event_log_writes_one_json_line_per_event(tmp_path):
    with EventLog(tmp_path / "events.jsonl", wall=lambda: 12.3456) as log:
        log(Waiting(time=1.5, reason="nodes"))
        log(Evaluated(time=2.0, version=1, uploads=5, where="server", metrics={"loss": math.nan}))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
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


def test_model_hash_depends_on_values_shapes_and_names_but_not_on_order():
    same = ArrayRecord({key: arrays()[key] for key in ("n", "w")})
    assert model_sha256(arrays()) == model_sha256(same)
    flat = ArrayRecord({"w": Array(np.ones(4, np.float32)), "n": Array(np.asarray(3))})
    assert len({model_sha256(item) for item in (arrays(), arrays(2.0), flat)}) == 3
