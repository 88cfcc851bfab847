"""A process that is killed at any moment: what is on disk then is enough to go on as if never."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import APP, check_same, config, events, newest_checkpoint

from simulation.engines.local.run import run_locally
from simulation.errors import RunFailed
from simulation.experiments.scheduler import set_options

pytestmark = pytest.mark.engine

RUN_AND_DIE = str(Path(__file__).with_name("run_and_die.py"))

# Every third version is saved, so that almost always something has happened since.
ROUNDS = {
    "num-server-rounds": 90,
    "num-clients": 6,
    "evaluate-every": 20,
    "checkpoint-versions": 3,
    "checkpoint-seconds": 0.0,
}


def kill_after(settings, more_uploads, chance=None):
    """Run in a process of its own that is killed a little after it has made so many uploads."""
    delay = (chance or random.Random(0)).uniform(0, 0.01)
    process = subprocess.run(
        [
            *(sys.executable, RUN_AND_DIE, str(more_uploads), str(delay)),
            *("run", "--engine", "local", "--workers", "0", "--quiet", *set_options(settings)),
        ],
        cwd=APP,
        env=os.environ | {"PYTHONPATH": str(APP)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=600,
    )
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def checkpoints(run_dir):
    return sorted((Path(run_dir) / "checkpoints").glob("*.ckpt"))


@pytest.mark.parametrize("strategy", ["fedpsa", "ca2fl"])
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bits(tmp_path, strategy):
    rounds = {**ROUNDS, "strategy": strategy}
    whole = run_locally(config(tmp_path, "whole", **rounds), workers=0, stream=False)
    settings = config(tmp_path, **rounds)
    resume = settings | {"resume": "true"}
    chance = random.Random(strategy)
    kill_after(settings, chance.randint(10, 30), chance)
    for _ in range(2):
        kill_after(resume, chance.randint(5, 25), chance)
    # Whatever happened after the checkpoint did not happen: nothing of it is counted twice.
    saved = newest_checkpoint(settings["run-dir"])
    assert saved["uploads"] <= len(events(settings["run-dir"], "upload"))
    check_same(run_locally(resume, workers=0, stream=False), whole)


def test_a_damaged_checkpoint_falls_back_and_a_changed_setting_is_refused_by_name(tmp_path):
    whole = run_locally(config(tmp_path, "whole", **ROUNDS), workers=0, stream=False)
    settings = config(tmp_path, **ROUNDS)
    resume = settings | {"resume": "true"}
    kill_after(settings, 30)
    *_, before, newest = checkpoints(settings["run-dir"])
    newest.write_bytes(newest.read_bytes()[:-1])

    log = (Path(settings["run-dir"]) / "events.jsonl").read_bytes()
    with pytest.raises(RunFailed, match=r"gamma was 5\.0, now 4\.0, seed was 0, now 1"):
        run_locally(resume | {"seed": 1, "gamma": 4.0}, workers=0, stream=False)
    assert (Path(settings["run-dir"]) / "events.jsonl").read_bytes() == log  # nothing was touched

    check_same(run_locally(resume, workers=0, stream=False), whole)
    assert not before.exists()


@pytest.mark.parametrize("named", ["checkpoint", "folder"])
def test_a_run_can_be_resumed_by_a_path(tmp_path, named):
    whole = run_locally(config(tmp_path, "whole", **ROUNDS), workers=0, stream=False)
    settings = config(tmp_path, **ROUNDS)
    kill_after(settings, 30)
    path = checkpoints(settings["run-dir"])[0] if named == "checkpoint" else settings["run-dir"]
    check_same(run_locally(settings | {"resume": str(path)}, workers=0, stream=False), whole)
