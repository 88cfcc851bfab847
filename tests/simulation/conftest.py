"""A tiny Flower app, and a check that no process of a test outlives it."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simulation.engines.flower.process_table import pids_with_variable
from support.tiny_app import write_app


@pytest.fixture(scope="session")
def tiny_app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Flower app."""
    return write_app(tmp_path_factory.mktemp("app"))


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], set[int]]]:
    """Mark all processes that a test starts; at its end none of them may be alive."""
    name, value = "FEDPSA_TEST_MARK", uuid.uuid4().hex
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))

    def alive() -> set[int]:
        return pids_with_variable(name, value) - {os.getpid()}

    yield alive
    # A guard whose launcher was killed needs a moment.
    deadline = time.monotonic() + 15
    while alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive()
