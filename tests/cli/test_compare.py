"""Runs of before: `load`, `compare` and `fedpsa compare`, also for other people's apps."""

import json
import sys

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedpsa_strategy import compare, load
from fedpsa_strategy.cli.main import main
from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.watch import RunLog, runs
from fedpsa_strategy.watch.runs import NotARunError
from support.events import ended, evaluated, started


@pytest.fixture(autouse=True)
def _no_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)


def make_run(folder, accuracies, *, measure="accuracy", end=True, **config):
    with RunLog(folder, {"strategy": "FedBuff", "dataset": "mine", **config}) as log:
        for time, value in enumerate(accuracies):
            log(evaluated(float(time), version=time, uploads=time, **{measure: value}))
        if end:
            log(ended(9.0, version=2, uploads=2))
        log.write_model(ArrayRecord({"w": Array(np.arange(3.0))}))
    return folder


def test_a_run_of_anybodys_app_can_be_loaded(tmp_path):
    run = load(make_run(tmp_path / "one", [0.25, 0.5], seed=3, tags="a, b"))
    assert (run.status, run.accuracy, run.name, run.tags) == ("completed", 0.5, "one", ["a", "b"])
    assert run.curve == [{"seconds": 0.0, "accuracy": 0.25}, {"seconds": 1.0, "accuracy": 0.5}]
    assert [event["event"] for event in run.events] == ["evaluate", "evaluate", "end"]
    assert run.model["w"].tolist() == [0.0, 1.0, 2.0]
    assert run.plot()._repr_png_().startswith(b"\x89PNG")


def test_tables_are_data_frames_where_pandas_is(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "pandas")
    pandas = pytest.importorskip("pandas")
    run = load(make_run(tmp_path / "one", [0.25, 0.5]))
    assert run.curve["accuracy"].tolist() == [0.25, 0.5]
    assert run.events["event"].tolist() == ["evaluate", "evaluate", "end"]
    assert isinstance(compare([run]).table, pandas.DataFrame)
    empty = load(make_run(tmp_path / "two", []))
    assert list(empty.curve.columns) == ["seconds", "accuracy"]


def test_a_damaged_event_and_a_missing_summary_are_no_obstacle(tmp_path):
    folder = make_run(tmp_path / "one", [0.25, 0.5])
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(lines[0] + b"{damaged\n" + lines[2][:10])
    (folder / "summary.json").unlink()
    run = load(folder)
    assert run.status == "running"
    assert run.accuracy == 0.25
    assert len(run.events) == 1


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(NotARunError, match=r"neither events\.jsonl"):
        load(tmp_path)
    with pytest.raises(NotARunError):
        compare([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([])
    folder = make_run(tmp_path / "one", [0.5])
    (folder / "model.npz").unlink()
    with pytest.raises(FileNotFoundError, match="holds no model"):
        load(folder).model  # noqa: B018


def test_seeds_become_one_line_and_settings_columns(tmp_path):
    runs = [
        make_run(tmp_path / f"{lr}-{seed}", [0.1, value], lr=lr, seed=seed)
        for lr, seed, value in [(0.1, 0, 0.5), (0.1, 1, 0.7), (0.2, 0, 0.8), (0.2, 1, 0.8)]
    ]
    found = compare(runs)
    assert [row["lr"] for row in found.rows] == [0.1, 0.1, 0.2, 0.2]
    first, second = found.groups
    assert first["accuracy"] == pytest.approx(0.6)
    assert first["accuracy_deviation"] == pytest.approx(0.02**0.5)
    assert (second["seeds"], second["finished"]) == ([0, 1], 2)
    lines = str(found).splitlines()
    assert len(lines) == 3
    assert "60.00 ± 14.14 %" in lines[1]
    assert len(found.text(each=True).splitlines()) == 5
    assert found._repr_html_().count("<tr>") == 3


def test_a_run_that_was_made_twice_is_one_measurement(tmp_path):
    for name, seed, value in (("a", 0, 0.5), ("again", 0, 0.5), ("b", 1, 0.7)):
        folder = make_run(tmp_path / name, [value], seed=seed)
        summary = json.loads((folder / "summary.json").read_text())
        summary["model_sha256"] = f"the model of seed {seed}"
        (folder / "summary.json").write_text(json.dumps(summary))
    found = compare([tmp_path / name for name in ("a", "again", "b")])
    (group,) = found.groups
    assert (group["seeds"], group["accuracy"]) == ([0, 1], pytest.approx(0.6))
    assert len(found.rows) == 3


def test_a_setting_that_an_older_run_does_not_have_is_no_difference(tmp_path):
    make_run(tmp_path / "old", [0.5], seed=0)
    make_run(tmp_path / "new", [0.7], seed=1, fresh=3)
    (group,) = compare([tmp_path / "old", tmp_path / "new"]).groups
    assert "fresh" not in group


def test_unfinished_runs_do_not_count_in_means(tmp_path):
    make_run(tmp_path / "a", [0.5], seed=0)
    make_run(tmp_path / "b", [0.9], seed=1, end=False)
    (group,) = compare([tmp_path / "a", tmp_path / "b"]).groups
    assert (group["accuracy"], group["finished"], group["seeds"]) == (0.5, 1, [0, 1])


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    make_run(tmp_path / "a", [0.5], tags="x", seed=0)
    make_run(tmp_path / "b", [0.7], tags="x,y", seed=1)
    assert main(["compare", str(tmp_path), "--each", "--plot", str(tmp_path / "p.png")]) == 0
    assert capsys.readouterr().out.count("completed") == 2
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", str(tmp_path), str(tmp_path / "b"), "--tag", "y", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in found["runs"]] == ["b"]
    assert main(["compare", str(tmp_path), "--tag", "z"]) == 2
    assert main(["compare", str(tmp_path / "nowhere")]) == 2


def test_accuracy_and_loss_are_not_drawn_into_one_picture(tmp_path, capsys):
    make_run(tmp_path / "a", [0.5])
    make_run(tmp_path / "b", [0.5], measure="loss")
    assert main(["compare", str(tmp_path), "--plot", str(tmp_path / "p.png")]) == 2
    assert "one picture" in capsys.readouterr().err


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "a", [0.5])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["compare", str(tmp_path), "--plot", str(tmp_path / "p.png")]) == 2
    assert "extra `watch`" in capsys.readouterr().err


def test_curves_of_runs_whose_folders_have_the_same_name_are_all_drawn(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(runs, "draw_curves", lambda curves, **_: drawn.update(curves) or b"")
    folders = [
        make_run(tmp_path / where / "run", [0.5], strategy=strategy)
        for where, strategy in (("a", "FedBuff"), ("b", "FedBuff"), ("c", "FedAvg"))
    ]
    compare(folders).plot()
    assert set(drawn) == {f"FedBuff, {folders[0]}", f"FedBuff, {folders[1]}", "FedAvg"}


def test_datasets_are_told_apart_beside_an_own_task(tmp_path):
    own = make_run(tmp_path / "own", [0.1], task="mine:Task", dataset="digits")
    others = [
        make_run(tmp_path / name, [0.5], task="", dataset=name) for name in ("mnist", "fmnist")
    ]
    columns = [
        [(row["task"], row["dataset"], row["finished"]) for row in compare(folders).groups]
        for folders in ([own, *others], [own, others[0]])
    ]
    assert columns[0] == [("mine:Task", None, 1), ("", "mnist", 1), ("", "fmnist", 1)]
    assert columns[1] == columns[0][:2]
    assert "dataset" not in compare([own]).rows[0]
    assert "task" not in compare(others).rows[0]


def test_areas_are_over_days_and_seconds_are_real_also_before_the_end(tmp_path):
    now = 100.0
    with RunLog(tmp_path / "one", {"clock": "virtual"}, wall=lambda: now) as log:
        log(started())
        log(evaluated(2 * DAY, accuracy=0.5))
        now = 130.0
        log(evaluated(4 * DAY, accuracy=0.5))
        running = load(tmp_path / "one").summary
        assert running["status"] == "running"
    summaries = running, load(tmp_path / "one").summary
    assert [found["area_under_curve"] for found in summaries] == [1.0, 1.0]
    assert [found["seconds"] for found in summaries] == [30.0, 30.0]
