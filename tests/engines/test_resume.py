"""A process that is killed at any moment: what is on disk then is enough to go on as if never."""

import random
from pathlib import Path

import pytest

from simulation.engines.local.run import run_locally
from simulation.errors import RunFailed
from support.engines import (
    ROUNDS,
    check_same,
    checkpoints,
    config,
    events,
    kill_after,
    newest_checkpoint,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("strategy", ["fedpsa", "ca2fl", "midpoint"])
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
