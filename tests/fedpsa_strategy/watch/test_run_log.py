"""A run of somebody else's app, watched with the lines that docs/DROP_IN.md shows."""

import json
import re
import stat
import textwrap
from pathlib import Path

import pytest

from fedpsa_strategy import FedBuff
from fedpsa_strategy.watch import EventLog, RunLog, StatusLine, read_events
from fedpsa_strategy.watch.dashboard.library import Library
from support.events import ended, started
from support.grids import RealTime, ScriptedGrid, model_arrays
from support.runs import counting_evaluation, run

PAGE = Path(__file__).parents[3] / "docs" / "DROP_IN.md"


def example():
    section = PAGE.read_text().partition("## Watching")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return textwrap.dedent(code)


def test_the_example_of_the_docs_leaves_a_run_that_the_live_page_shows(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    grid = ScriptedGrid(4, time=RealTime())
    evaluate_fn, _ = counting_evaluation()
    names = {"grid": grid, "arrays": model_arrays(), "evaluate_fn": evaluate_fn}
    with caplog.at_level("INFO", "flwr"):
        exec(compile(example(), "DROP_IN.md", "exec"), names)
    assert any("4 clients" in message for message in caplog.messages)
    folder = tmp_path / "runs/my-run"
    events = list(read_events(folder / "events.jsonl"))
    assert (events[-1].kind, events[-1].version) == ("end", 10)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert (summary["versions"], summary["uploads"]) == (10, events[-1].uploads)
    assert summary["accuracy"] == pytest.approx(0.1)
    assert names["log"].run.version == 10
    (shown,) = Library([tmp_path / "runs"]).runs().values()
    page = shown.snapshot()
    assert (page["status"], page["strategy"], page["clock"]) == ("completed", "FedBuff", "wall")
    assert page["totals"]["version"] == 10
    assert page["series"]["accuracy"][-1][3] == pytest.approx(0.1)
    assert page["damaged"] == 0


def test_the_listeners_need_neither_settings_nor_a_summary(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        strategy = FedBuff(buffer_size=1, listeners=[log, StatusLine()])
        run(strategy, ScriptedGrid(2), num_versions=3)
    (shown,) = Library([tmp_path]).runs().values()
    page = shown.snapshot()
    assert (page["status"], page["totals"]["version"], page["config"]) == ("running", 3, {})


def broken_off(folder, error):
    with RunLog(folder) as log:
        log(started())
        raise error


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_how_it_ended_is_in_the_summary(tmp_path):
    with pytest.raises(ValueError, match="no data"):
        broken_off(tmp_path / "a", ValueError("no data"))
    assert summary_of(tmp_path / "a")["status"] == "failed"
    assert summary_of(tmp_path / "a")["error"] == "ValueError: no data"
    with pytest.raises(KeyboardInterrupt):
        broken_off(tmp_path / "b", KeyboardInterrupt())
    assert summary_of(tmp_path / "b")["status"] == "stopped"
    with RunLog(tmp_path / "c") as log:
        log(started())
    assert summary_of(tmp_path / "c")["status"] == "stopped"
    with RunLog(tmp_path / "d") as log:
        log(started())
        log(ended())
    assert summary_of(tmp_path / "d")["status"] == "completed"
    assert "error" not in summary_of(tmp_path / "d")
    shown = {name: item.snapshot() for name, item in Library([tmp_path]).runs().items()}
    assert shown["a"]["error"] == "ValueError: no data"
    assert shown["d"]["end_reason"] == "enough"


def test_a_folder_takes_one_run_and_is_for_its_owner_alone(tmp_path):
    folder = tmp_path / "runs" / "x"
    with RunLog(folder, config={"lr": 0.1, "seed": 2**63}):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (shown,) = Library([folder]).runs().values()
    assert shown.snapshot()["config"] == {"clock": "wall", "lr": "0.1", "seed": str(2**63)}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match=rf"{folder} already holds a run: choose another"):
        RunLog(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_summary_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch, caplog):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    first, second = RunLog(tmp_path / "a"), RunLog(tmp_path / "b")
    monkeypatch.setattr("fedpsa_strategy.watch.run_log.write_atomically", full)
    with pytest.raises(ValueError, match="first"), first:
        raise ValueError("first")
    assert "No space left on device" in caplog.text
    with pytest.raises(OSError, match="No space left"), second:
        pass
