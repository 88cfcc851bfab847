"""A worker process that is stopped holds up one client, and nobody else."""

import subprocess
import time

import psutil
import pytest

from simulation.experiments.processes import set_options
from support.engines import APP, events, launch, wait_for


@pytest.mark.slow
def test_a_stopped_process_costs_the_others_no_slot(tmp_path):
    """One slot: without patience there would be no further upload."""
    settings = {
        "run-dir": str(tmp_path / "run"),
        "cache-dir": str(tmp_path / "cache"),
        "clock": "wall",
        "max-in-flight": 1,
        "overdue-floor": 2.0,
        "overdue-ceiling": 5.0,
        "num-server-rounds": 1_000_000,
        "evaluate-every": 1000,
        "local-epochs": 20,
        "time-limit": 30.0,
    }
    command = ["run", "--engine", "local", "--workers", "4", "--quiet", "--clients", "8"]
    with launch(*command, *set_options(settings), cwd=APP, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: len(events(settings["run-dir"], "upload")) >= 20, what="twenty uploads")
        workers = psutil.Process(process.pid).children(recursive=True)
        worker = max(workers, key=lambda child: child.cpu_times().user)
        worker.suspend()
        stopped = time.time()
        try:
            process.wait(timeout=120)
        finally:
            process.kill()
            if worker.is_running():
                worker.kill()
    (overdue,) = events(settings["run-dir"], "overdue")
    (start,), (end,) = (events(settings["run-dir"], kind) for kind in ("start", "end"))
    uploads = [event["wall"] for event in events(settings["run-dir"], "upload")]
    before = sum(wall < stopped for wall in uploads) / (stopped - start["wall"])
    after = sum(wall > overdue["wall"] for wall in uploads) / (end["wall"] - overdue["wall"])
    print(f"uploads: {before:.2f}/s before, {after:.2f}/s after")
    assert after > 0.3 * before  # machines are shared: without patience it is 0
