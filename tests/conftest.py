"""What all tests share."""

import os
import signal
import sys
from pathlib import Path

import pytest

# The scripted grid is shared by test folders.
sys.path.insert(0, str(Path(__file__).parent / "fedpsa_strategy"))

# Before anything imports Flower or Ray: nothing leaves this machine.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# In the background of a shell that ignores Ctrl-C, what the tests start would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def flower_identity():
    """Give this process the identity that Flower needs to create messages."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
