"""A node whose memory is full: its upload is rejected with that reason, and it is asked again."""

import pytest
from flwr.app import Error

from fedpsa_strategy import FedBuff
from fedpsa_strategy.server.options import Failures
from support.grids import ScriptedGrid, update
from support.runs import recorded, virtual

CUDA = (
    "Traceback (most recent call last):\n  File 'app.py', line 3, in train\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
    "capacity of 23.65 GiB of which 7.06 MiB is free. " + "Of the allocated memory " * 30
)
OURS = "task.errors.OutOfMemoryError: the memory of cuda:0 is full: use a smaller batch-size"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (CUDA, "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"),
        (OURS, "the memory of cuda:0 is full: use a smaller batch-size"),
        ("Traceback ...\nMemoryError", "MemoryError"),
    ],
)
def test_it_is_paused_at_once_and_asked_again(text, part):
    full = [True]

    def behaviour(message):
        if grid.partition(message) == 1 and full:
            full.clear()
            return Error(code=1, reason=text)
        return update(sketch=None)

    grid = ScriptedGrid(3, behaviour)
    strategy = FedBuff(
        buffer_size=2, max_in_flight=3, failures=Failures(max_failures=5, pause=700.0), **virtual(3)
    )
    recorder = recorded(strategy, grid, num_versions=20)
    (rejected,) = recorder.of("reject")
    assert rejected.client == 1
    assert part in rejected.reason
    assert len(rejected.reason) < 600
    (paused,) = recorder.of("quarantine")
    assert paused.until == rejected.time + 700.0
    dispatches = [event.time for event in recorder.of("dispatch") if event.client == 1]
    assert not [time for time in dispatches if rejected.time < time < paused.until]
    assert max(dispatches) >= paused.until
    assert [event for event in recorder.of("upload") if event.client == 1]


def test_another_error_is_tried_again_at_once():
    failures = [True]

    def behaviour(message):
        if grid.partition(message) == 1 and failures:
            failures.clear()
            return Error(code=1, reason="RuntimeError: the OutOfMemoryErrors of others")
        return update(sketch=None)

    grid = ScriptedGrid(3, behaviour)
    strategy = FedBuff(buffer_size=2, max_in_flight=3, **virtual(3))
    recorder = recorded(strategy, grid, num_versions=5)
    assert len(recorder.of("reject")) == 1
    assert not recorder.of("quarantine")
