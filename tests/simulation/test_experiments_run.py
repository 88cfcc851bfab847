"""The commands from end to end, on a dataset that takes moments."""

import json
import os
import shlex
import signal
import subprocess
import threading

import pytest

from simulation import cli
from support.commands import parsed
from support.doc_commands import code_blocks
from support.engines import assert_no_upload_twice, launch, num_uploads, wait_for

SMALL = ["--datasets", "digits", "--alphas", "0.5", "--seeds", "0"]


@pytest.mark.engine
def test_an_experiment_is_run_once(tmp_path, marked, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["reproduce", "table-accuracy", *SMALL, "--days", "0.005", "--jobs", "2"]
    command += ["--methods", "FedPSA,Uniform"]
    assert cli.main(command) == 0
    output = capsys.readouterr().out
    assert output.count("started") == output.count("finished ") == 2
    assert not marked()
    results = tmp_path / "results" / "table-accuracy"
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    rows = [json.loads(line) for line in before["cells.jsonl"].decode().splitlines()]
    assert [row["labels"]["method"] for row in rows] == ["FedPSA", "Uniform"]
    assert all(row["status"] == "completed" for row in rows)
    assert rows[0]["numbers"]["mean_kappa"] > 0
    assert "| FedPSA |" in before["table.md"].decode()
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}

    assert cli.main(command) == 0
    output = capsys.readouterr().out
    assert "All 2 cells of table-accuracy are finished" in output
    assert "started" not in output
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before

    assert cli.main(["report"]) == 0
    page = (tmp_path / "results" / "index.html").read_text()
    assert "<td>Uniform</td>" in page


@pytest.mark.engine
def test_an_interrupted_experiment_goes_on_where_it_stopped(tmp_path, marked, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["reproduce", "table-accuracy", *SMALL, "--methods", "Uniform", "--jobs", "1"]
    command += ["--days", "0.1"]
    process = launch(*command, cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for(lambda: num_uploads(tmp_path) > 20)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert "0 of 1 cells are finished" in output
    assert "Traceback" not in errors
    assert not marked()
    (folder,) = tmp_path.glob("runs/cells/[0-9a-f]*")
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    table = tmp_path / "results" / "table-accuracy" / "table.md"
    assert "0 of 1 runs finished" in table.read_text()
    kept = num_uploads(tmp_path)

    assert cli.main(command) == 0
    assert "continued" in capsys.readouterr().out
    assert "1 of 1 runs finished" in table.read_text()
    assert not (folder / "checkpoints").exists()
    # It went on: what happened before the interruption happened once.
    assert_no_upload_twice(folder, kept)


@pytest.mark.engine
def test_two_commands_on_one_folder_share_the_work(tmp_path, marked, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--methods", "FedPSA,Uniform", "--jobs", "1", "--days", "0.005"]
    command = ["reproduce", "table-accuracy", *SMALL, *options]
    other = launch(*command, cwd=tmp_path)
    code = cli.main(command)
    outputs = [capsys.readouterr().out, other.communicate(timeout=200)[0]]
    assert (code, other.returncode) == (0, 0), outputs
    # Whichever took a cell, it was run once, and both know of it.
    assert sum(output.count("started ") for output in outputs) == 2, outputs
    assert all("failed" not in output for output in outputs), outputs
    table = (tmp_path / "results" / "table-accuracy" / "table.md").read_text()
    assert "2 of 2 runs finished" in table
    assert not marked()


@pytest.mark.engine
def test_a_command_takes_up_what_a_killed_one_left(tmp_path, marked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--methods", "Uniform", "--jobs", "1", "--days", "0.05"]
    command = ["reproduce", "table-accuracy", *SMALL, *options]
    first = launch(*command, cwd=tmp_path)
    wait_for(lambda: list(tmp_path.glob("runs/cells/*/events.jsonl")))
    killer = threading.Timer(0.5, first.kill)  # while this one waits for it
    killer.start()
    assert cli.main(command) == 0
    first.communicate()
    table = (tmp_path / "results" / "table-accuracy" / "table.md").read_text()
    assert "1 of 1 runs finished" in table
    (folder,) = tmp_path.glob("runs/cells/[0-9a-f]*")
    assert_no_upload_twice(folder, 50)


def test_the_commands_of_the_page_exist():
    commands = [
        line.split("  #")[0].strip()
        for block in code_blocks("docs/reproduction/RUNNING.md")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    assert len(commands) > 5
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == [".venv/bin/python", "-m", "simulation"]
        parsed(words[3:])
