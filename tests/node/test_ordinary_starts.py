"""Whatever keeps the warm process from working: the ordinary start, with one line in the log."""

import json
import os
import socket
import subprocess
import threading

import pytest

from fedpsa_strategy.node.front import (
    DOWN,
    PATIENCE,
    PROTOCOL,
    READY,
    STATE,
    NotStartedError,
    hand_over,
)
from fedpsa_strategy.node.server import set_state
from support.warm import WarmNode, wait_for

PARENT = "import os; print(os.getppid())"
COUNT = "import os, sys; print(os.getppid()); open(sys.argv[1], 'a').write('x')"


def check_ordinary(node, reason, *arguments):
    code, out, errors = node.run(*arguments)
    assert (code, int(out)) == (0, os.getpid())
    [line] = errors.splitlines()
    assert line.startswith("WARNING:   fedpsa-node: ordinary start of a ClientApp: ")
    assert reason in line


def check_warm(node):
    code, out, errors = node.run()
    assert (code, int(out), errors) == (0, node.warm.pid, "")


def test_a_warm_process_that_was_killed_is_replaced(tmp_path):
    with WarmNode(tmp_path, PARENT) as node:
        check_warm(node)
        killed = node.warm
        killed.kill()
        wait_for(lambda: node.state() == DOWN)
        check_ordinary(node, "the warm process is not running")
        node.wait_until_ready()
        assert node.warm != killed
        check_warm(node)
        assert "exit code -9" in node.log.read_text()


def test_a_folder_that_went_with_the_supernode_is_not_made_again(tmp_path):
    set_state(tmp_path, READY)
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    set_state(tmp_path / "gone", READY)
    assert not (tmp_path / "gone").exists()


def test_nobody_is_left_to_start_it_again(tmp_path):
    with WarmNode(tmp_path, PARENT) as node:
        for process in node.processes():
            process.kill()
        wait_for(lambda: not node.processes())
        assert node.state() == READY
        check_ordinary(node, "the warm process is not running")
        for file in node.folder.iterdir():
            file.unlink()
        check_ordinary(node, "the warm process is not running")
        node.folder.rmdir()


def test_without_its_keeper_it_works_until_the_supernode_ends(tmp_path):
    with WarmNode(tmp_path, PARENT) as node:
        keeper, warm = node.processes()
        keeper.kill()
        keeper.wait()
        assert int(node.run()[1]) == warm.pid
        node.end_supernode()
        warm.wait(10)
        for file in node.folder.iterdir():
            file.unlink()
        node.folder.rmdir()


def test_a_message_survives_the_warm_process(tmp_path):
    program = "import sys; print('running', flush=True); print(sys.stdin.read())"
    with WarmNode(tmp_path, program) as node:
        front = node.start(stdin=subprocess.PIPE)
        front.stdout.readline()
        node.warm.kill()
        out, errors = front.communicate("worked", timeout=20)
        assert out == "worked\n"
        assert errors == "WARNING:   fedpsa-node: the warm process died during a message\n"
        node.wait_until_ready()


@pytest.mark.slow
def test_one_that_takes_too_long_starts_nothing_later(tmp_path):
    runs = tmp_path / "runs"
    with WarmNode(tmp_path, COUNT) as node:
        warm = node.warm
        warm.suspend()
        front = node.start(str(runs))
        assert front.wait(60) == 0
        # Until now the output was also in what the warm process has not read yet.
        warm.resume()
        out, errors = front.communicate(timeout=60)
        assert int(out) == os.getpid()
        assert f"no answer in {PATIENCE[READY]:g} s" in errors
        wait_for(lambda: not warm.children())
        code, out, errors = node.run(str(runs))
        assert (code, int(out), errors) == (0, warm.pid, "")
    assert runs.read_text() == "xx"


def test_another_version(tmp_path):
    with WarmNode(tmp_path, PARENT) as node, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(node.folder / "socket"))
        request = json.dumps({"protocol": PROTOCOL + 1}).encode()
        connection.sendall(len(request).to_bytes(4, "big"))
        socket.send_fds(connection, [request], [0])
        assert "another version" in json.loads(connection.makefile().readline())["refused"]


@pytest.mark.parametrize("nonsense", [b"", b"\xff\xff\xff\xff", b"\0\0\0\2{]", b"\0\0\0\2[]"])
def test_nonsense_from_a_peer_harms_nobody(tmp_path, nonsense):
    with WarmNode(tmp_path, PARENT) as node:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(node.folder / "socket"))
            connection.sendall(nonsense)
        check_warm(node)


def test_a_silent_peer_keeps_nobody_waiting(tmp_path):
    with WarmNode(tmp_path, PARENT) as node, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(node.folder / "socket"))
        check_warm(node)


def test_a_changed_environment_is_imported_anew(tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "library.py").write_text("VERSION = 1")
    program = "import library, os; print(os.getppid())"
    environment = {"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"}
    with WarmNode(tmp_path, program, ["library"], environment=environment) as node:
        before = node.warm
        (packages / "library.py").unlink()
        (packages / "library.py").write_text("VERSION = 20")
        check_ordinary(node, "the Python environment has changed")
        wait_for(lambda: node.state() == READY and not before.is_running())
        check_warm(node)


def test_a_refusal_is_read_however_soon_it_comes(tmp_path, monkeypatch):
    """The other end may have answered and gone before the last call that sends the request."""
    (tmp_path / STATE).write_text(READY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()

    def refuse():
        connection, _ = listener.accept()
        with connection:
            connection.recv(4, socket.MSG_WAITALL)
            _, descriptors, _, _ = socket.recv_fds(connection, 2**20, 4)
            connection.sendall(b'{"refused": "not today"}\n')
        for descriptor in descriptors:
            os.close(descriptor)

    thread = threading.Thread(target=refuse)
    thread.start()
    send = socket.send_fds

    def sent_and_answered(*arguments):
        number = send(*arguments)
        thread.join()
        return number

    monkeypatch.setattr(socket, "send_fds", sent_and_answered)
    with listener, pytest.raises(NotStartedError, match="not today"):
        hand_over(str(tmp_path), [])


def test_runtime_dependencies(tmp_path):
    with WarmNode(tmp_path, PARENT) as node:
        check_ordinary(node, "an environment of its own", "--allow-runtime-dependency-installation")


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("", "ModuleNotFoundError: No module named 'library'"),
        ("raise OSError('no libcuda')", "OSError: no libcuda"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, name='pump',"
            " daemon=True).start()",
            "runs threads, which a child would not have (pump)",
        ),
    ],
)
def test_a_library_that_cannot_be_preloaded(tmp_path, library, reason):
    if library:
        (tmp_path / "library.py").write_text(library)
    environment = {"PYTHONPATH": str(tmp_path)}
    with WarmNode(tmp_path, PARENT, ["library"], environment=environment) as node:
        wait_for(lambda: node.state() == DOWN)
        check_ordinary(node, "the warm process is not running")
        log = node.log.read_text()
        assert "ClientApps start the ordinary way" in log
        assert reason in log
