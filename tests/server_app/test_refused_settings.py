"""What the ServerApp does with settings that cannot be used."""

import json
import logging

import pytest
from flwr.app import Context, RecordDict

from server_app import app as server_app
from server_app.method_settings import SettingsError


def start(**run_config):
    config = {key.replace("_", "-"): value for key, value in run_config.items()}
    server_app.app(None, Context(1, 1, {}, RecordDict(), config))


def test_the_reason_is_left_in_the_runs_folder(tmp_path):
    with pytest.raises(SettingsError, match=r"^lr = -1\.0: must be above 0"):
        start(lr=-1.0, run_dir=str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "lr = -1.0: must be above 0" in summary["error"]


def test_a_run_that_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "events.jsonl").write_text("{}\n")
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    for resume in ("", "true"):
        with pytest.raises(SettingsError, match=r"^lr = -1\.0: must be above 0"):
            start(lr=-1.0, run_dir=str(tmp_path), resume=resume)
    assert (tmp_path / "summary.json").read_text() == '{"status": "completed"}'


@pytest.mark.parametrize("folder", ["/dev/null/x", "a\0b", "/" + 300 * "x"])
def test_a_folder_that_cannot_be_made_does_not_hide_the_reason(folder):
    with pytest.raises(SettingsError):
        start(lr=-1.0, run_dir=folder)


def test_what_has_no_effect_is_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(server_app, "run_settings", lambda *_: {})
    with caplog.at_level(logging.WARNING, "flwr"):
        start(mixing=0.3)
    assert "mixing = 0.3 has no effect: strategy 'fedpsa' does not read it" in caplog.text
