"""How the end of a run is told, with a stand-in for Flower's command."""

import json
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from simulation.engines.flower.processes import ProcessGroup
from simulation.engines.flower.submit import submit
from simulation.engines.flower.superlink import SuperLink
from simulation.environment import flower_environment, new_token
from simulation.errors import LaunchFailed, RunFailed, RunTimeout

# Answers `flwr run|log|list|stop`; what it does is read from files next to it.
FLWR = """#!{python}
import json, sys, time
from pathlib import Path
here = Path(sys.argv[0]).parent
command = sys.argv[1]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if command == "log":
    exec((here / "log.py").read_text())
else:
    print((here / (command + ".json")).read_text())
"""


class FakeSuperLink:
    """What `Run` needs of a `SuperLink`, with the real way of calling ``flwr``."""

    connection = "fake"
    flwr = SuperLink.flwr

    def __init__(self, group, folder):
        self.group = group
        self.folder = folder
        self.process = group.start("superlink", ["sleep", "600"])

    def says(self, **answers):
        for command, answer in answers.items():
            (self.folder / f"{command}.json").write_text(json.dumps(answer))

    def logs(self, script):
        (self.folder / "log.py").write_text(script)

    def calls(self):
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def superlink(tmp_path, marked):
    folder = tmp_path / "launch"
    folder.mkdir()
    command = folder / "flwr"
    command.write_text(FLWR.format(python=sys.executable))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    environment = flower_environment(folder, new_token())
    environment["PATH"] = f"{folder}:{environment['PATH']}"
    with ProcessGroup(tmp_path / "logs", environment=environment, grace=0.5) as group:
        link = FakeSuperLink(group, folder)
        link.says(run={"success": True, "run-id": "42"}, stop={"success": True})
        link.logs("print('hello')")
        yield link


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def start(superlink, app, run_dir, **more):
    return submit(superlink, app, {"run-dir": str(run_dir), **more})


def writes(run_dir, **summary):
    return f"open({str(run_dir / 'summary.json')!r}, 'w').write({json.dumps(summary)!r})\n"


def test_a_completed_run(superlink, tiny_app, run_dir):
    superlink.logs(writes(run_dir, status="completed", accuracy=0.5) + "print('one\\ntwo')")
    lines = []
    run = start(superlink, tiny_app, run_dir, text='say "hi"')
    assert run.wait(echo=lines.append) == {"status": "completed", "accuracy": 0.5}
    assert lines == ["one", "two"]
    call = superlink.calls()[0]
    assert call[2:4] == ["fake", "--run-config"]
    assert call[4] == f'run-dir="{run_dir}" text="say \\u0022hi\\u0022"'


def test_a_failed_run_says_why(superlink, tiny_app, run_dir):
    superlink.logs(writes(run_dir, status="failed", error="ValueError: no") + "print('trace')")
    with pytest.raises(RunFailed, match="The run failed: ValueError: no") as caught:
        start(superlink, tiny_app, run_dir).wait()
    assert caught.value.summary is not None
    assert caught.value.log_tail == "trace"


def test_a_stopped_run_is_no_completed_run(superlink, tiny_app, run_dir):
    superlink.logs(writes(run_dir, status="stopped"))
    with pytest.raises(RunFailed, match=r"The run was stopped\."):
        start(superlink, tiny_app, run_dir).wait()


def test_a_log_that_ends_too_early_is_no_end_of_the_run(superlink, tiny_app, run_dir):
    superlink.says(list={"success": True, "runs": [{"status": "running", "status-details": "N/A"}]})
    superlink.logs(
        "if (here / 'second').exists():\n"
        "    " + writes(run_dir, status="completed") + "(here / 'second').touch()\n"
    )
    start(superlink, tiny_app, run_dir).wait()
    assert [call[0] for call in superlink.calls()] == ["run", "log", "list", "log"]


@pytest.mark.parametrize("left_behind", [None, '{"status": "completed"}', '{"status": "comp'])
def test_a_run_without_its_own_summary_did_not_complete(superlink, tiny_app, run_dir, left_behind):
    if left_behind:
        (run_dir / "summary.json").write_text(left_behind)
    row = {"status": "finished:failed", "status-details": "No module named 'x'"}
    superlink.says(list={"success": True, "runs": [row]})
    superlink.logs("print('INFO :      Starting Flower Simulation\\nthe last words')")
    with pytest.raises(RunFailed, match="finished:failed, No module named 'x'") as caught:
        start(superlink, tiny_app, run_dir).wait()
    assert caught.value.log_tail == "the last words"


def test_a_superlink_that_dies_is_named(superlink, tiny_app, run_dir):
    superlink.logs("time.sleep(0.5); sys.exit(1)")
    run = start(superlink, tiny_app, run_dir)
    superlink.process.process.kill()
    with pytest.raises(RunFailed, match="The SuperLink ended in the middle of the run"):
        run.wait()


def test_a_log_that_breaks_off_is_taken_up_again(superlink, tiny_app, run_dir):
    superlink.says(list={"success": True, "runs": [{"status": "running", "status-details": "N/A"}]})
    superlink.logs(
        "print('one\\ntwo')\n"
        "if not (here / 'broken').exists():\n"
        "    (here / 'broken').touch()\n"
        "    sys.exit(1)\n"
        "print('three')\n" + writes(run_dir, status="completed")
    )
    lines = []
    start(superlink, tiny_app, run_dir).wait(echo=lines.append)
    assert lines == ["one", "two", "three"]


def test_a_time_limit(superlink, tiny_app, run_dir):
    superlink.logs("time.sleep(600)")
    with pytest.raises(RunTimeout, match="did not end within 1 s"):
        start(superlink, tiny_app, run_dir).wait(timeout=1.0)


def test_stopping_asks_the_server_app_first(superlink, tiny_app, run_dir):
    request = run_dir / "stop-requested"
    request.touch()  # an old request is for an old run
    superlink.logs(
        f"while not Path({str(request)!r}).exists():\n"
        "    time.sleep(0.05)\n"
        "print('stopping')\n" + writes(run_dir, status="stopped")
    )
    run = start(superlink, tiny_app, run_dir)
    time.sleep(0.5)
    lines = []
    run.stop(echo=lines.append)
    assert lines == ["stopping"]
    assert not request.exists()
    assert [call[0] for call in superlink.calls()] == ["run", "log"]


def test_ctrl_c_stops_the_run(superlink, tiny_app, run_dir, monkeypatch, capsys):
    monkeypatch.setattr("simulation.engines.flower.submit._REQUEST_SECONDS", 0.5)
    superlink.logs(
        "print('working', flush=True)\n"
        "time.sleep(2)\n" + writes(run_dir, status="stopped") + "time.sleep(600)"
    )

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(superlink, tiny_app, run_dir).wait(echo=interrupt)
    assert [call[0] for call in superlink.calls()] == ["run", "log", "stop"]
    assert "Stopping the run" in capsys.readouterr().err


def test_runs_that_cannot_work_are_refused_before_anything_starts(
    superlink, tiny_app, run_dir, tmp_path
):
    with pytest.raises(LaunchFailed, match=r"no setting 'modee': did you mean mode\?"):
        start(superlink, tiny_app, run_dir, modee="once")
    with pytest.raises(LaunchFailed, match="absolute path"):
        start(superlink, tiny_app, Path("runs"))
    with pytest.raises(LaunchFailed, match="not the folder of a Flower app"):
        start(superlink, tmp_path, run_dir)
    assert not (superlink.folder / "calls").exists()


def test_flowers_own_refusal_is_passed_on(superlink, tiny_app, run_dir):
    message = "Using SuperLink: fake (127.0.0.1:1)\n\nInvalid federation.\nTry another."
    superlink.says(run={"success": False, "error-message": message})
    with pytest.raises(LaunchFailed) as caught:
        start(superlink, tiny_app, run_dir)
    assert str(caught.value) == "`flwr run` failed: Invalid federation. Try another."


def test_runs_can_be_followed_outside_the_main_thread(superlink, tiny_app, run_dir):
    superlink.logs(writes(run_dir, status="completed"))
    results = []
    thread = threading.Thread(
        target=lambda: results.append(start(superlink, tiny_app, run_dir).wait())
    )
    thread.start()
    thread.join(timeout=30)
    assert results == [{"status": "completed"}]
