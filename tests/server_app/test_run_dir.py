import json
import math
import os
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from safetensors.numpy import load_file

from server_app.run_dir import LOCK, RunDir, RunDirError, model_sha256


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
        LOCK,
        "config.toml",
        "model.safetensors",
        "summary.json",
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path)
    run_dir.write("x", b"old")

    def broken(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/x'"):
        run_dir.write("x", b"new and longer")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, "x"}


def test_a_folder_with_a_run_is_refused(tmp_path):
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(FileExistsError, match="already holds a run"):
        RunDir(tmp_path)


def test_model_hash_depends_on_values_shapes_and_names_but_not_on_order():
    same = ArrayRecord({key: arrays()[key] for key in ("n", "w")})
    assert model_sha256(arrays()) == model_sha256(same)
    flat = ArrayRecord({"w": Array(np.ones(4, np.float32)), "n": Array(np.asarray(3))})
    assert len({model_sha256(item) for item in (arrays(), arrays(2.0), flat)}) == 3


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_its_owners_and_one_that_exists_stays_as_it_is(tmp_path):
    RunDir(tmp_path / "runs" / "new").close()
    assert mode(tmp_path / "runs" / "new") == 0o700
    shared = tmp_path / "shared"  # a volume, or a folder that a person opened to others
    shared.mkdir()
    shared.chmod(0o755)
    RunDir(shared).close()
    assert mode(shared) == 0o755


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(tmp_path):
    with pytest.raises(RunDirError, match="run-dir /dev/null/x cannot be made: /dev/null is not"):
        RunDir(Path("/dev/null/x"))
    with pytest.raises(FileNotFoundError, match="holds no run that could be resumed"):
        RunDir(tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()


def test_what_a_killed_writer_left_is_removed(tmp_path):
    for name in (".summary.json.123", ".model.safetensors.0a1b2c3d", ".gitignore"):
        (tmp_path / name).write_text("half")
    RunDir(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, ".gitignore"}


HOLD = """
import sys, time
from pathlib import Path
from server_app.run_dir import RunDir
run_dir = RunDir(Path(sys.argv[1]), resume=True)
print("locked", flush=True)
time.sleep(600)
"""


def test_one_process_at_a_time_works_in_a_folder_and_a_killed_one_lets_go(tmp_path):
    (tmp_path / "events.jsonl").touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            assert other.stdout.readline() == "locked\n"
            before = {path: path.read_bytes() for path in tmp_path.iterdir()}
            with pytest.raises(
                RunDirError, match=rf"in use by another process \(pid {other.pid}\)"
            ):
                RunDir(tmp_path, resume=True)
            assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        finally:
            os.kill(other.pid, signal.SIGKILL)
    RunDir(tmp_path, resume=True).close()
    RunDir(tmp_path, resume=True).close()
