"""No process survives its launcher, however it detached itself and however the launcher ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from simulation.engines.flower.process_table import list_processes
from simulation.engines.flower.processes import ProcessGroup
from simulation.environment import (
    TOKEN_VARIABLE,
    accepts_connections,
    flower_environment,
    free_port,
    launch_folder,
    new_token,
)

# Leaves its session and its parent, as a daemon does, and does not listen to SIGTERM.
DETACHED = """
import os, signal, sys, time
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
time.sleep(600)
"""

LAUNCHER = f"""
import sys, time
from pathlib import Path
from simulation.environment import flower_environment, launch_folder, new_token
from simulation.engines.flower.processes import ProcessGroup

ending, pid_file, grace = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
with launch_folder() as folder:
    environment = flower_environment(folder, new_token())
    logs = folder / "logs"
    with ProcessGroup(logs, environment=environment, grace=grace, folder=folder) as group:
        group.start("sleeper", ["sleep", "600"])
        group.start("daemon", [sys.executable, "-c", {DETACHED!r}, str(pid_file)])
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.02)
        print(folder, flush=True)
        if ending == "exception":
            raise RuntimeError("as planned")
        if ending == "signal":
            time.sleep(600)
"""


@pytest.fixture
def group(tmp_path: Path, marked: Callable[[], set[int]]) -> ProcessGroup:
    environment = flower_environment(tmp_path, new_token())
    return ProcessGroup(tmp_path / "logs", environment=environment, grace=0.3)


def hear_all_signals() -> None:
    """Undo what whoever started the tests in the background, or under nohup, had ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def launch(ending: str, pid_file: Path, grace: float = 0.3) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, ending, str(pid_file), str(grace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=hear_all_signals,
    )


def is_alive(pid: int) -> bool:
    return any(p.pid == pid and not p.zombie for p in list_processes())


@pytest.mark.parametrize(("ending", "exit_code"), [("normal", 0), ("exception", 1)])
def test_everything_ends_with_the_launcher(
    ending: str, exit_code: int, tmp_path: Path, marked: Callable[[], set[int]]
) -> None:
    launcher = launch(ending, tmp_path / "pid")
    output, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == exit_code
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert not marked()
    assert not Path(output.strip()).exists()


@pytest.mark.parametrize(
    ("number", "exit_code"),
    # An uncaught KeyboardInterrupt ends Python by SIGINT itself, so that the shell can tell.
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_everything_ends_with_a_launcher_that_gets_a_signal(
    number: signal.Signals, exit_code: int, tmp_path: Path, marked: Callable[[], set[int]]
) -> None:
    launcher = launch("signal", tmp_path / "pid")
    assert launcher.stdout is not None
    folder = launcher.stdout.readline().strip()
    launcher.send_signal(number)
    launcher.communicate(timeout=30)
    assert launcher.returncode == exit_code
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert not marked()
    assert not Path(folder).exists()


def test_a_guard_cleans_up_after_a_launcher_that_was_killed(
    tmp_path: Path, marked: Callable[[], set[int]]
) -> None:
    launcher = launch("signal", tmp_path / "pid")
    assert launcher.stdout is not None
    folder = launcher.stdout.readline().strip()
    launcher.kill()
    launcher.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while marked() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert not Path(folder).exists()


def test_a_second_signal_does_not_wait_for_the_grace_time(
    tmp_path: Path, marked: Callable[[], set[int]]
) -> None:
    launcher = launch("signal", tmp_path / "pid", grace=60.0)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.send_signal(signal.SIGINT)
    time.sleep(1.0)  # the clean-up has begun, and waits for the one that ignores SIGTERM
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=20)
    assert not marked()


def test_stopped_processes_end_too(group: ProcessGroup) -> None:
    with group:
        child = group.start("sleeper", ["sleep", "600"])
        os.kill(child.pid, signal.SIGSTOP)
    assert child.wait() == -signal.SIGTERM


def test_the_exit_codes_of_orphans_are_collected(group: ProcessGroup, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with group:
        group.start("daemon", [sys.executable, "-c", DETACHED, str(pid_file)])
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.02)
    assert int(pid_file.read_text()) not in {p.pid for p in list_processes()}


def test_signal_handlers_are_restored_and_ignored_signals_stay_ignored(
    group: ProcessGroup,
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with group:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_goes_to_a_file_and_can_be_followed(group: ProcessGroup) -> None:
    script = "import time; print('one'); time.sleep(0.3); print('two\\rthree'); print('é', end='')"
    with group:
        child = group.start("printer", [sys.executable, "-c", script])
        assert list(child.follow()) == ["one", "two\rthree", "é"]
        assert child.wait() == 0
    assert child.log_path.read_bytes().decode() == "one\ntwo\rthree\né"
    assert child.tail(1) == "é"


def test_following_ends_when_the_time_has_passed(group: ProcessGroup) -> None:
    with group:
        child = group.start("sleeper", ["sh", "-c", "echo ready; sleep 600"])
        started = time.monotonic()
        assert list(child.follow(timeout=0.5)) == ["ready"]
        assert time.monotonic() - started < 5
        assert child.running


def test_a_log_that_grows_too_long_starts_over(group: ProcessGroup) -> None:
    with group:
        child = group.start("printer", ["sh", "-c", "echo long; sleep 1; echo short; sleep 600"])
        assert list(child.follow(timeout=0.5)) == ["long"]
        child.trim_log(limit=100)
        assert child.tail() == "long"
        child.trim_log(limit=3)
        time.sleep(1.0)
        assert child.tail() == "short"


def test_where_no_variables_are_shown_the_process_tree_must_do(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with monkeypatch.context() as patch:
        patch.setattr(
            "simulation.engines.flower.process_table.pids_with_variable", lambda *_: set()
        )
        with group:
            group.start("shell", ["sh", "-c", script])
            while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
                time.sleep(0.02)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_environment_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    monkeypatch.setenv("NO_PROXY", "example.org")
    with launch_folder() as folder:
        environment = flower_environment(folder, "secret")
        assert environment["FLWR_HOME"].startswith(str(folder))
    assert not folder.exists()
    assert environment[TOKEN_VARIABLE] == "secret"
    assert "RAY_ADDRESS" not in environment
    assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    for switch in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        assert environment[switch] == "0"
    for switch in (
        "FLWR_DISABLE_UPDATE_CHECK",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION",
    ):
        assert environment[switch] == "1"


def test_free_ports_are_free_and_differ() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 15
    assert not any(accepts_connections(port) for port in ports)
