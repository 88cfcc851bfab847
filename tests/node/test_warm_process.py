"""What a child of the warm process is like: as one that was started the ordinary way."""

import json
import os
import signal
import stat
import subprocess
import time

import psutil
import pytest

from support.warm import WarmNode

ORDINARY = "ordinary start of a ClientApp"

TELL = """
import json, os, random, sys
umask = os.umask(0); os.umask(umask)
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "folder": os.getcwd(),
    "umask": umask, "input": sys.stdin.read(), "name": __name__, "file": __file__,
    "path": sys.path, "environment": dict(os.environ), "random": random.random(),
    "modules": sorted(sys.modules), "main": sys.modules["__main__"].__dict__ is globals(),
}))
print("to the log", file=sys.stderr)
sys.exit(3)
"""


def test_a_child_is_what_an_ordinary_process_would_be(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with WarmNode(tmp_path, TELL) as node:
        started = {"cwd": elsewhere, "text": "some input", "umask": 0o27}
        code, out, errors = node.run("--token", "secret", **started)
        child = json.loads(out)
        assert child["parent"] == node.warm.pid
        again = json.loads(node.run()[1])
        given = node.cold_environment
        code_2, out, errors_2 = node.run("--token", "secret", **started, env=given)
        ordinary = json.loads(out)
    assert ordinary["parent"] == os.getpid()
    assert (code, errors) == (code_2, errors_2) == (3, "to the log\n")
    assert again["pid"] != child["pid"]
    assert len({each["random"] for each in (child, again, ordinary)}) == 3
    for differs in ("pid", "parent", "random"):
        del child[differs], ordinary[differs]
    # What the baseline of this test brings along.
    assert set(child.pop("modules")) >= set(ordinary.pop("modules"))
    # The shell in front sets it.
    for each in (child, ordinary):
        for name in ("PWD", "OLDPWD", "SHLVL", "_"):
            each["environment"].pop(name, None)
    assert child == ordinary


def test_the_modules_of_a_child_are_those_of_an_ordinary_process(tmp_path):
    program = """
import sys
import flwr.supernode.cli
print(*sys.modules)
import unittest.mock, some_library
print(*sys.modules)
"""
    (tmp_path / "some_library.py").write_text("import graphlib")
    environment = {"PYTHONPATH": str(tmp_path)}
    options = {"own_module": "flwr.supernode.cli", "environment": environment}
    with WarmNode(tmp_path, program, ["some_library"], **options) as node:
        _, warm, _ = node.run()
        _, cold, _ = node.run(env=node.cold_environment)
    for one, other in zip(warm.splitlines(), cold.splitlines(), strict=True):
        assert set(one.split()) == set(other.split())


PARENT_OR_CHILD = "import os; print('imported in', os.getpid()); LINE = {!r}"


def test_libraries_are_imported_once_and_an_apps_own_modules_come_before_them(tmp_path):
    library, bundle = tmp_path / "library", tmp_path / "bundle"
    for folder in (library / "heavy", bundle / "heavy", bundle / "fedpsa_strategy"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"PLACE = {folder.parent.name!r}")
        (folder / "part.py").write_text(f"PLACE = {folder.parent.name!r}")
    (library / "heavy" / "__init__.py").write_text("import heavy.part, os; PID = os.getpid()")
    (library / "queue_of_library.py").write_text("PLACE = 'library'")
    (library / "user_of_heavy.py").write_text("import heavy, queue_of_library")
    (bundle / "queue_of_library.py").write_text("PLACE = 'bundle'")
    program = """
import os, sys
assert not {"heavy", "fedpsa_strategy", "queue_of_library"} & set(sys.modules)
if sys.argv[1] == "bundle":
    sys.path.insert(0, sys.argv[2])
    import fedpsa_strategy, heavy, heavy.part, queue_of_library
    print(fedpsa_strategy.PLACE, heavy.PLACE, heavy.part.PLACE, queue_of_library.PLACE)
else:
    import heavy.part
    import importlib.util, user_of_heavy
    loader = importlib.util.find_spec("heavy").loader
    print(heavy.PID == os.getppid(), heavy.part.PLACE, type(loader).__name__,
          heavy.__spec__.loader is loader, user_of_heavy.queue_of_library.PLACE)
"""
    environment = {"PYTHONPATH": str(library)}
    with WarmNode(tmp_path, program, ["user_of_heavy"], environment=environment) as node:
        assert node.run("bundle", str(bundle))[1].split() == ["bundle"] * 4
        expected = ["True", "library", "SourceFileLoader", "True", "library"]
        assert node.run("library")[1].split() == expected
        # The app changes between two runs, and two apps run at once.
        other = tmp_path / "other"
        (other / "fedpsa_strategy").mkdir(parents=True)
        (other / "fedpsa_strategy" / "__init__.py").write_text("PLACE = 'changed'")
        (bundle / "fedpsa_strategy").rename(tmp_path / "old")
        (bundle / "fedpsa_strategy").symlink_to(other / "fedpsa_strategy")
        assert node.run("bundle", str(bundle))[1].split() == ["changed", *["bundle"] * 3]


def test_two_apps_with_modules_of_one_name_run_at_once(tmp_path):
    program = """
import sys, time
sys.path.insert(0, sys.argv[1])
import task
print(task.NAME, flush=True)
sys.stdin.read()
print(task.NAME)
"""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.py").write_text(f"NAME = {name!r}")
    with WarmNode(tmp_path, program) as node:
        children = [node.start(str(tmp_path / n), stdin=subprocess.PIPE) for n in "ab"]
        assert [child.stdout.readline() for child in children] == ["a\n", "b\n"]
        assert [child.communicate("")[0] for child in children] == ["a\n", "b\n"]


def test_training_with_two_threads_in_a_child_of_a_process_that_knows_torch(tmp_path):
    pytest.importorskip("torch")
    program = """
import torch
assert not torch.cuda.is_initialized()
torch.set_num_threads(2)
model = torch.nn.Linear(600, 600)
model(torch.ones(400, 600)).square().sum().backward()
print(torch.get_num_threads(), float(model.weight.grad.abs().sum()) > 0)
import numpy
print(numpy.random.random(), torch.rand(1).item())
"""
    with WarmNode(tmp_path, program, ["torch", "numpy"]) as node:
        outputs = [node.run()[1].splitlines() for _ in range(2)]
    assert [trained for trained, _ in outputs] == ["2 True"] * 2
    # As in processes of their own, nothing random repeats unless it is seeded.
    random = [number for _, numbers in outputs for number in numbers.split()]
    assert len(set(random)) == 4


ENDS = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "at exit")
def leak(seconds):
    time.sleep(seconds)
    print("thread", flush=True)
match sys.argv[1]:
    case "exit": sys.exit("some reason")
    case "raise": raise ValueError("on fire")
    case "leak": threading.Thread(target=leak, args=[0.2]).start()
    case "daemon": threading.Thread(target=leak, args=[60], daemon=True).start()
    case "_exit": os._exit(7)
    case "kill": os.kill(os.getpid(), signal.SIGKILL)
    case "interrupt": raise KeyboardInterrupt
    case "fork":
        if os.fork() == 0:
            sys.stdin.close(); os.close(1); os.close(2); time.sleep(60)
"""


@pytest.mark.parametrize(
    "way", ["exit", "raise", "leak", "daemon", "_exit", "kill", "interrupt", "nothing"]
)
def test_a_child_ends_as_an_ordinary_process_does(way, warm_ends):
    code, out, errors = warm_ends.run(way)
    cold_code, cold_out, cold_errors = warm_ends.run(way, env=warm_ends.cold_environment)
    # A shell's number for the signal that ended a process.
    assert code == (cold_code if cold_code >= 0 else 128 - cold_code)
    assert out == cold_out
    assert errors.splitlines()[-1:] == cold_errors.splitlines()[-1:]


@pytest.fixture(scope="module")
def warm_ends(tmp_path_factory):
    with WarmNode(tmp_path_factory.mktemp("ends"), ENDS) as node:
        yield node


def test_a_child_that_leaves_a_process_behind_has_ended(warm_ends):
    before, started = warm_ends.processes(), time.monotonic()
    assert warm_ends.run("fork")[0] == 0
    assert time.monotonic() - started < 30
    # What is left behind has the command line of the warm process.
    left = [process for process in warm_ends.processes() if process not in before]
    for process in left:
        process.kill()
    assert len(left) == 1


SIGNALS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
print("running", flush=True)
time.sleep(60)
"""


def test_signals_reach_the_child(tmp_path):
    with WarmNode(tmp_path, SIGNALS) as node:
        front = node.start()
        assert front.stdout.readline() == "running\n"
        front.terminate()
        assert front.communicate(timeout=20)[1] == "asked to end\n"
        assert front.returncode == 1
        front = node.start()
        front.stdout.readline()
        child = node.processes()[2]
        front.kill()
        child.wait(10)
        front.communicate()
        # The other way round.
        front = node.start()
        front.stdout.readline()
        node.processes()[2].kill()
        front.communicate(timeout=20)
        assert front.returncode == 128 + signal.SIGKILL


def test_only_the_owner_can_reach_the_socket(tmp_path):
    with WarmNode(tmp_path, "") as node:
        assert stat.S_IMODE(node.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((node.folder / "socket").stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("state", ["idle", "stopped", "busy"])
def test_it_ends_with_its_supernode(tmp_path, state):
    with WarmNode(tmp_path, SIGNALS) as node:
        keeper, warm = node.processes()
        front = None
        if state == "stopped":
            warm.suspend()
        if state == "busy":
            front = node.start()
            front.stdout.readline()
        node.end_supernode()
        psutil.wait_procs([keeper, warm], timeout=10)
        assert not keeper.is_running()
        assert not warm.is_running()
        assert not node.folder.exists()
        if front is not None:  # Flower ends its own processes
            front.kill()
            front.communicate()


def check_flat(tmp_path, messages, library):
    """Count what the warm process has after some messages, and after more."""
    with WarmNode(tmp_path, f"import {library}", [library]) as node:
        found = []
        for _ in range(2):
            for _ in range(messages // 2):
                code, _, errors = node.run()
                assert (code, errors) == (0, "")
            warm = node.warm
            assert not warm.children()
            found.append((warm.num_fds(), warm.num_threads(), warm.memory_info().rss))
    before, after = found
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 2**20


def test_the_warm_process_does_not_grow(tmp_path):
    check_flat(tmp_path, 20, "unittest.mock")


@pytest.mark.slow
def test_the_warm_process_does_not_grow_with_500_messages(tmp_path):
    check_flat(tmp_path, 500, "torch")


def test_an_idle_warm_process_does_nothing(tmp_path):
    with WarmNode(tmp_path, "") as node:
        time.sleep(0.2)
        before = [sum(process.cpu_times()) for process in node.processes()]
        time.sleep(1.0)
        assert [sum(process.cpu_times()) for process in node.processes()] == before
