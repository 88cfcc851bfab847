"""Lists of values, files, presets and sweeps on the command line."""

import json
import tomllib
from datetime import UTC, datetime
from math import nan
from pathlib import Path

import pytest

from server_app.settings import Settings
from simulation import cli, launch
from simulation.combinations import combinations, is_sweep, values
from simulation.errors import Refused
from simulation.experiments.scheduler import Scheduler
from simulation.presets import PRESETS
from support.commands import parsed
from support.own_method import write_example

DEFAULTS = Settings().to_run_config()


def config(*words):
    return cli.build_run_config(parsed(words), DEFAULTS, datetime(2026, 1, 2, tzinfo=UTC))


# --- Lists --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "found"),
    [
        ("lr", "0.01,0.1", ["0.01", "0.1"]),
        ("lr", "0.01, 0.1 ,0.1", ["0.01", "0.1"]),
        ("lr", "0.01", ["0.01"]),
        ("thermometer", "true,false", ["true", "false"]),
        ("strategy", "fedpsa,fedbuff,my.module:Class", ["fedpsa", "fedbuff", "my.module:Class"]),
        ("latency", "uniform,long-tail", ["uniform", "long-tail"]),
        # Commas that belong to the value.
        ("run-dir", "/data/a,b", ["/data/a,b"]),
        ("data-dir", "/data/a,b", ["/data/a,b"]),
        ("tags", "a,b", ["a,b"]),
        ("method-settings", "word='a,b' trim=0.1", ["word='a,b' trim=0.1"]),
        ("method-settings", "trim=0.1,0.2", ["trim=0.1,0.2"]),
    ],
)
def test_commas_part_values_where_they_are_not_part_of_one(key, text, found):
    assert values(key, text) == found


def test_settings_of_an_own_method_are_lists_too(tmp_path, monkeypatch):
    reference = "trimmed:TrimmedMean"
    write_example(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert values("method.trim", "0.1,0.2", reference) == ["0.1", "0.2"]
    pairs = [("strategy", reference), ("method.trim", "0.1,0.2"), ("lr", "1,2")]
    assert len(combinations(pairs)) == 4
    assert combinations(pairs)[0] == [
        ("strategy", reference),
        ("method.trim", "0.1"),
        ("lr", "1"),
    ]


def test_every_combination_is_run_once_and_the_last_word_counts():
    pairs = [("lr", "5"), ("lr", "0.01,0.1"), ("seed", "0,1"), ("tags", "a,b")]
    assert is_sweep(pairs)
    assert [dict(each) for each in combinations(pairs)] == [
        {"lr": lr, "seed": seed, "tags": "a,b"} for lr in ("0.01", "0.1") for seed in ("0", "1")
    ]
    assert not is_sweep([("tags", "a,b"), ("lr", "1")])


def test_lists_with_holes_and_far_too_many_runs_are_refused():
    with pytest.raises(Refused, match="empty place"):
        values("lr", "0.1,,0.2")
    many = ",".join(map(str, range(1, 200)))
    with pytest.raises(Refused, match="7,880,599 runs"):
        combinations([("seed", many), ("buffer-size", many), ("queue-size", many)])


# --- Presets and files --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings_that_exist(name):
    Settings.from_run_config(PRESETS[name])


def test_the_papers_preset_is_what_the_experiments_run():
    from simulation.experiments.cells import METHODS
    from simulation.experiments.options import Options

    labels = {"method": "FedPSA", "dataset": "fmnist", "alpha": 0.1, "seed": 0}
    cell = Options().cell(labels, METHODS["FedPSA"])
    ours = config("run", "--preset", "paper-fmnist", "--preset", "skew-strong")
    from simulation.experiments.options import make_cell

    assert make_cell(labels, {k: v for k, v in ours.items() if k != "run-dir"}).id == cell.id


def test_options_go_before_files_before_presets(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('lr = 0.5\nnum-clients = 7\ndataset = "fmnist"\n[method]\ntrim = 0.2\n')
    words = ["run", "--preset", "paper-mnist", "--config", str(file), "--set", "lr=0.25"]
    found = config(*words, "--tag", "a", "--tag", "b", "--name", "mine")
    assert (found["lr"], found["num-clients"], found["dataset"]) == (0.25, 7, "fmnist")
    assert found["evaluate-interval"] == 2160.0
    assert found["method-settings"] == "trim=0.2"
    assert found["tags"] == "a,b"
    assert found["run-dir"] == str(Path("runs", "mine").absolute())
    assert config(*words, "--clients", "3")["num-clients"] == 3


def test_a_file_may_tell_the_settings_of_a_method_in_both_ways(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('method-settings = "buffer-size=3"\n[method]\ntrim = 0.2\n')
    assert config("run", "--config", str(file))["method-settings"] == "buffer-size=3 trim=0.2"


def test_a_name_goes_before_a_files_folder_and_contradicts_an_option(tmp_path):
    (tmp_path / "mine.toml").write_text('run-dir = "/data/mine"\n')
    found = config("run", "--config", str(tmp_path / "mine.toml"), "--name", "mine")
    assert found["run-dir"] == str(Path("runs", "mine").absolute())
    with pytest.raises(Refused, match="contradicts --name"):
        config("run", "--name", "mine", "--set", "run-dir=/data/mine")


def test_a_config_that_is_shown_is_a_config_that_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "quick", "--set", "strategy=fedbuff", "--set", "lr=0.25"]
    assert cli.main(["run", *words, "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert tomllib.loads(shown)["lr"] == 0.25
    (tmp_path / "my.toml").write_text(shown)
    assert cli.main(["run", "--config", "my.toml", "--show-config"]) == 0
    assert capsys.readouterr().out == shown
    assert cli.main(["run", *words, "--show-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == tomllib.loads(shown)
    assert [path.name for path in tmp_path.iterdir()] == ["my.toml"]


def test_the_config_of_a_run_repeats_it_in_another_folder(tmp_path):
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "config.toml").write_text(f'lr = 0.5\nrun-dir = "{folder}"\nresume = "true"\n')
    found = config("run", "--config", str(folder / "config.toml"))
    assert found["lr"] == 0.5
    assert found["run-dir"] != str(folder)
    assert "resume" not in found
    (tmp_path / "mine.toml").write_text('run-dir = "/data/mine"\n')
    assert config("run", "--config", str(tmp_path / "mine.toml"))["run-dir"] == "/data/mine"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr = ", "my.toml: "),
        ("lr = [1]", "lr must be a number"),
        ("learning-rate = 1", "did you mean lr?"),
        ("method = 3", "method must be a table"),
        ("[method]\nday = 2026-01-01", "method.day must be a number"),
        ("lr = 'x'", "lr = 'x': must be a number"),
    ],
)
def test_a_bad_file_is_one_sentence(text, sentence, tmp_path, capsys):
    (tmp_path / "my.toml").write_text(text)
    assert cli.main(["run", "--config", str(tmp_path / "my.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert cli.main(["run", "--config", str(tmp_path / "none.toml")]) == 2


def test_json_is_all_that_is_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(launch.ENGINES, "local", lambda _: {"status": "completed", "loss": nan})
    assert cli.main(["run", "--engine", "local", "--json", "--name", "x"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run-dir": str(tmp_path / "runs" / "x"),
        "status": "completed",
        "loss": None,
    }


# --- Sweeps -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "clock=wall", "--set", "time-limit=9"], "real time is what they measure"),
        (["--run-dir", "x"], "--name names the folder"),
        (["--show-config"], "go with single ones"),
        (["--set", "run-dir=x"], "a folder of its own"),
        (["--set", "lr=-1"], "lr = -1.0: must be above 0"),
        (["--set", "num-clients=2", "--clients", "3"], "contradicts"),
    ],
)
def test_sweeps_that_cannot_be_are_refused(words, sentence, capsys):
    assert cli.main(["run", "--seeds", "0-1", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_sweep_runs_side_by_side_once_and_ends_with_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(launch.APP))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    command = ["run", "--clients", "4", "--set", "num-server-rounds=2", "--set", "virtual-days=0"]
    command += ["--set", "strategy=fedbuff", "--set", "lr=0.01,0.1", "--set", "fraction-train=0.5"]

    def run(*more):
        assert cli.main([*command, "--name", "search", *more]) == 0
        return capsys.readouterr().out

    first = run()
    assert "2 runs, 0 of them finished" in first
    *_, head, one, other = first.rstrip().splitlines()
    assert head.split()[:4] == ["run", "strategy", "dataset", "lr"]
    assert [one.split()[3], other.split()[3]] == ["0.01", "0.1"]
    found = json.loads(run("--json"))
    assert [row["lr"] for row in found["runs"]] == [0.01, 0.1]
    assert found["failed"] == {}
    assert len(list((tmp_path / "runs" / "search").glob("*/summary.json"))) == 2


def test_a_sweep_in_which_every_run_fails_says_why_in_json_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Scheduler, "run", lambda *_: {"0a1b": "it broke"})
    words = ["--seeds", "0-1", "--set", "virtual-days=0.1", "--name", "x", "--json"]
    assert cli.main(["run", *words]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {"runs": [], "groups": [], "failed": {"0a1b": "it broke"}}
