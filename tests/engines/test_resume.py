"""A process that is killed at any moment: what is on disk then is enough to go on as if never."""

import random

import pytest

from simulation.engines.local.run import run_locally
from support.engines import ROUNDS, check_same, config, events, kill_after, newest_checkpoint

pytestmark = pytest.mark.engine


# That of methods with memories is in the checkpoint: tests/fedpsa_strategy/test_checkpoint.py.
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("ca2fl", "midpoint")]


@pytest.mark.parametrize("strategy", ["fedpsa", *SLOWLY])
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
