"""What a run leaves in its folder, and what a refused one does not touch."""

import json
import math
import resource
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from simulation import cli
from simulation.engines.local.run import run_locally
from simulation.errors import RunFailed
from simulation.experiments.processes import set_options
from support.engines import (
    ROUNDS,
    check_same,
    checkpoints,
    config,
    events,
    kill_after,
    newest_checkpoint,
)

pytestmark = pytest.mark.engine

SHORT = {"num-server-rounds": 0, "virtual-days": 0.005, "max-failures": 50}


def files(folder):
    """Return everything below a folder, but for the lock."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def summary_of(settings):
    return json.loads((Path(settings["run-dir"]) / "summary.json").read_text())


def run(settings):
    return run_locally(settings, workers=0, stream=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A completed run of nine versions, saved every fourth, and its settings."""
    settings = config(tmp_path_factory.mktemp("finished"), **ROUNDS)
    settings |= {"num-server-rounds": 9, "checkpoint-versions": 4}
    run(settings)
    return settings


def test_a_run_that_learned_nothing_is_a_failed_run(tmp_path, capsys, monkeypatch):
    def diverge(model, *_, **__):
        for parameter in model.parameters():
            parameter.data.fill_(math.nan)
        return 1.0

    monkeypatch.setattr("client_app.app.train_model", diverge)
    settings = config(tmp_path, **SHORT)
    options = ["run", "--engine", "local", "--workers", "0", *set_options(settings)]
    assert cli.main(options) == 1
    error = capsys.readouterr().err
    assert "without a new version of the model" in error
    assert "0 uploads were accepted" in error
    assert "Most frequent reasons: " in error
    summary = summary_of(settings)
    assert (summary["status"], summary["versions"]) == ("failed", 0)
    assert summary["rejected"] > 0
    assert summary["error"].startswith("NothingLearnedError: ")
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num-server-rounds": 8}, "num-server-rounds = 8: the run is at 9 already"),
        ({"num-server-rounds": 9}, "num-server-rounds = 9: the run is at 9 already"),
        ({"num-server-rounds": 5}, "num-server-rounds = 5: the run is at 9 already"),
        ({"num-server-rounds": 0, "virtual-days": 1e-6}, "virtual-days = 1e-06: the run is at 0.0"),
        (
            {"num-server-rounds": 20, "seed": 7, "gamma": 4.0},
            r"gamma was 5\.0, now 4\.0, seed was 0, now 7",
        ),
        ({"resume": ""}, "already holds a run"),
        ({"resume": "/none"}, "cannot be read"),
    ],
)
def test_a_refused_resume_changes_nothing(finished, change, sentence):
    before = files(finished["run-dir"])
    with pytest.raises(RunFailed, match=sentence):
        run(finished | {"resume": "true"} | change)
    assert files(finished["run-dir"]) == before
    assert summary_of(finished)["status"] == "completed"


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(finished, monkeypatch):
    before = files(finished["run-dir"])
    monkeypatch.setattr(
        "server_app.app.load_checkpoint",
        lambda *_: newest_checkpoint(finished["run-dir"]) | {"size": 5},
    )
    with pytest.raises(RunFailed, match="the checkpoint's model has 5 values, this run's 2410"):
        run(finished | {"resume": "true", "num-server-rounds": 20})
    assert files(finished["run-dir"]) == before


def test_only_the_owner_reads_checkpoints(finished):
    folder = Path(finished["run-dir"]) / "checkpoints"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_longer_limit_goes_on(finished, tmp_path):
    whole = config(tmp_path, "whole", **ROUNDS) | {"num-server-rounds": 14}
    whole = run(whole | {"checkpoint-versions": 4})
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", finished["run-dir"], copy], check=True)
    longer = finished | {"run-dir": str(copy), "num-server-rounds": 14, "resume": "true"}
    check_same(run(longer), whole)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A whole run, and the settings of one that was killed in its middle."""
    folder = tmp_path_factory.mktemp("killed")
    whole = run(config(folder, "whole", **ROUNDS))
    settings = config(folder, **ROUNDS)
    kill_after(settings, 30)
    return whole, settings


@pytest.fixture
def copied(killed, tmp_path):
    whole, settings = killed
    subprocess.run(["cp", "-r", settings["run-dir"], tmp_path / "run"], check=True)
    return whole, settings | {"run-dir": str(tmp_path / "run"), "resume": "true"}


def test_a_damaged_checkpoint_falls_back_to_the_one_before(copied):
    whole, settings = copied
    *_, before, newest = checkpoints(settings["run-dir"])
    newest.write_bytes(newest.read_bytes()[:-1])
    check_same(run(settings), whole)
    assert not before.exists()


@pytest.mark.parametrize("named", ["checkpoint", "folder"])
def test_a_run_can_be_resumed_by_a_path(copied, named):
    whole, settings = copied
    folder = settings["run-dir"]
    path = checkpoints(folder)[0] if named == "checkpoint" else folder
    check_same(run(settings | {"resume": str(path)}), whole)


def test_a_flipped_bit_in_the_log_does_not_keep_a_run_from_going_on(copied, caplog):
    whole, settings = copied
    path = Path(settings["run-dir"]) / "events.jsonl"
    content = bytearray(path.read_bytes())
    place = content.index(b'"event": "upload"') + 40
    content[place] ^= 4
    path.write_bytes(content)
    number = content[:place].count(b"\n") + 1
    summary = run(settings)
    assert summary["model_sha256"] == whole["model_sha256"]
    assert summary["uploads"] == whole["uploads"]
    assert f"{path}: damaged lines left out: {number}" in caplog.messages


def test_a_log_that_is_cut_short_is_not_padded(copied, caplog):
    whole, settings = copied
    path = Path(settings["run-dir"]) / "events.jsonl"
    path.write_bytes(path.read_bytes()[:1000])
    kill_after(settings, 2)  # before the next checkpoint: what it wrote did not happen
    summary = run(settings)
    assert summary["model_sha256"] == whole["model_sha256"]
    assert summary["uploads"] == whole["uploads"]
    assert b"\0" not in path.read_bytes()
    sequences = [event["sequence"] for event in events(settings["run-dir"], "upload")]
    assert len(sequences) == len(set(sequences)) < whole["uploads"]
    path.unlink()
    with pytest.raises(RunFailed, match="is at 90 already"):
        run(settings)


def test_a_run_without_its_log_goes_on(copied, caplog):
    whole, settings = copied
    path = Path(settings["run-dir"]) / "events.jsonl"
    path.unlink()
    assert run(settings)["model_sha256"] == whole["model_sha256"]
    assert f"{path} is missing: its events are lost" in caplog.messages


def test_a_full_disk_at_the_end_names_the_file(finished, tmp_path):
    settings = finished | {"run-dir": str(tmp_path / "run"), "checkpoint-versions": 0}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7000, before[1]))
    try:
        with pytest.raises(RunFailed, match=r"model\.safetensors"):
            run(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "model.safetensors" in summary_of(settings)["error"]
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not [name for name in left if name.startswith(".") and name != ".lock"]


def test_a_launch_is_refused_before_an_engine_is_started(finished, capsys):
    settings = finished | {"resume": "true", "num-server-rounds": 5}
    for engine in ("ray", "local"):
        assert cli.main(["run", "--engine", engine, *set_options(settings)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("Error: num-server-rounds = 5: the run is at 9 already")
