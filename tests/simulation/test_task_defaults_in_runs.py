"""What a run makes of settings that are left to its task."""

import tomllib

from simulation.engines.local.run import run_locally

SMALL = {
    "num-clients": 4,
    "fraction-train": 1.0,
    "buffer-size": 2,
    "local-epochs": 1,
    "virtual-days": 0.0,
    "checkpoint-versions": 1,
}
OLD = {"lr": 0.01, "batch-size": 64, "evaluate-every": 10}  # what nobody had to write down


def run(folder, versions, **more):
    config = {**SMALL, "run-dir": str(folder), "num-server-rounds": versions, **more}
    return run_locally(config, workers=0, stream=False)


def config_of(folder):
    config = tomllib.loads((folder / "config.toml").read_text())
    return {key: config[key] for key in OLD}


def test_the_folder_of_a_run_shows_what_was_used(tmp_path):
    summary = run(tmp_path / "left", 2)
    digits = {"lr": 0.1, "batch-size": 16, "evaluate-every": 5}
    assert config_of(tmp_path / "left") == digits
    assert {key: summary["settings"][key] for key in digits} == digits
    assert run(tmp_path / "set", 2, **digits)["model_sha256"] == summary["model_sha256"]


def test_a_run_of_before_goes_on_with_the_command_it_had(tmp_path):
    whole = run(tmp_path / "whole", 4, **OLD)
    run(tmp_path / "old", 2, **OLD)
    resumed = run(tmp_path / "old", 4, resume=True)
    assert config_of(tmp_path / "old") == OLD
    assert resumed["model_sha256"] == whole["model_sha256"]
