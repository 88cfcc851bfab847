"""A run that is submitted again after it died."""

import json
from pathlib import Path
from typing import Any

import pytest

from simulation.errors import RunFailed
from simulation.unattended import Unattended


class Scripted(Unattended):
    """Attempts whose ends are known beforehand."""

    def __init__(self, folder: Path, ends: list[Any], **patience: float) -> None:
        self.pauses: list[float] = []
        self.said: list[str] = []
        super().__init__(
            folder,
            {"run-dir": str(folder / "run")},
            say=self.said.append,
            sleep=self.pauses.append,
            **patience,
        )
        self.ends = iter(ends)

    def _attempt(self) -> tuple[str, dict[str, Any] | None]:
        status, new_checkpoint, summary = next(self.ends)
        folder = self.run_dir / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        if new_checkpoint:
            (folder / f"checkpoint-{len(list(folder.iterdir())):012}.ckpt").touch()
        if summary is not None:
            (self.run_dir / "summary.json").write_text(json.dumps(summary))
        return status, summary


DONE = {"status": "completed"}
FAILED = {"status": "failed", "error": "OSError: disk"}


def test_it_goes_on_until_the_run_is_complete(tmp_path: Path) -> None:
    ends = [("finished:failed", True, None), ("finished:failed", True, FAILED)]
    run = Scripted(tmp_path, [*ends, ("finished:completed", True, DONE)])
    assert run.run() == DONE
    assert run.pauses == [10.0, 10.0]
    assert "The run ended: OSError: disk. It is submitted again in 10 s." in run.said


def test_pauses_grow_and_end(tmp_path: Path) -> None:
    lost = ("SuperLink cannot be reached", False, None)
    run = Scripted(tmp_path, [lost] * 9, attempts=6, pause=30.0, longest_pause=200.0)
    with pytest.raises(RunFailed, match="6 attempts in a row brought no new checkpoint"):
        run.run()
    assert run.pauses == [30.0, 60.0, 120.0, 200.0, 200.0]


def test_progress_starts_the_count_again(tmp_path: Path) -> None:
    lost, progress = ("lost", False, None), ("lost", True, None)
    ends = [lost, lost, progress, lost, lost, ("finished:completed", False, DONE)]
    run = Scripted(tmp_path, ends, attempts=4, pause=1.0)
    assert run.run() == DONE
    assert run.pauses == [1.0, 2.0, 1.0, 2.0, 4.0]


def test_what_somebody_stopped_stays_stopped(tmp_path: Path) -> None:
    run = Scripted(tmp_path, [("finished:stopped", True, {"status": "stopped"})])
    with pytest.raises(RunFailed, match="was stopped; the same command goes on"):
        run.run()


def test_a_run_that_was_complete_before_is_not_taken_for_this_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(DONE))
    run = Scripted(tmp_path, [("lost", False, None)] * 2, attempts=2)
    with pytest.raises(RunFailed):
        run.run()


def test_a_folder_without_a_checkpoint_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[dict[str, Any]] = []
    said: list[str] = []

    def submit(self: Unattended, config: dict[str, Any]) -> str:
        configs.append(config)
        return "7"

    monkeypatch.setattr(Unattended, "_submit", submit)
    monkeypatch.setattr(Unattended, "_wait", lambda self, run_id: "finished:failed")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("{}\n")
    run = Unattended(tmp_path, {"run-dir": str(folder)}, say=said.append, sleep=lambda _: None)
    assert run._attempt() == ("finished:failed", None)
    assert (tmp_path / "run.begun-1" / "events.jsonl").exists()
    assert not folder.exists()
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "checkpoint-000000000001.ckpt").touch()
    run._attempt()
    assert [config.get("resume") for config in configs] == [None, "true"]


def test_flowers_commands_are_those_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever calls the environment's Python by its path has no `flwr` in the PATH."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    run = Unattended(
        tmp_path,
        {"run-dir": str(tmp_path / "run")},
        superlink="nowhere",
        attempts=1,
    )
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(RunFailed, match="`flwr run` failed"):
        run.run()
