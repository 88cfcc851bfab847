"""What all tests share."""

import os
import signal
import time
import uuid
from pathlib import Path

import pytest

# Before anything imports Flower or Ray: nothing leaves this machine.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Small models gain nothing from threads, which wait for each other where processors are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In the background of a shell that ignores Ctrl-C, what the tests start would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def flower_identity():
    """Give this process the identity that Flower needs to create messages."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


@pytest.fixture
def one_thread():
    """Compute with a single thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def marked(monkeypatch):
    """Mark all processes that a test starts; at its end none of them may be alive."""
    from simulation.engines.flower.process_table import pids_with_variable

    name, value = "FEDPSA_TEST_MARK", uuid.uuid4().hex
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))

    def alive():
        return pids_with_variable(name, value) - {os.getpid()}

    yield alive
    # A guard whose launcher was killed needs a moment.
    deadline = time.monotonic() + 15
    while alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Return the library's wheel."""
    from support.wheel import build_wheel

    return build_wheel(tmp_path_factory.mktemp("wheel"))
