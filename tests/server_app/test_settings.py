import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from server_app.build import make_probe, make_task
from server_app.settings import Settings, SettingsError, key_of

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_pyproject_holds_every_setting_with_its_default_and_a_comment():
    text = PYPROJECT.read_text()
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    assert config == Settings().to_run_config()
    lines = text[text.index("[tool.flwr.app.config]") :].splitlines()
    for item in fields(Settings):
        index = next(i for i, line in enumerate(lines) if line.startswith(f"{key_of(item.name)} ="))
        assert lines[index - 1].startswith("# "), f"{key_of(item.name)} has no comment"


def test_the_defaults_are_the_papers():
    settings = Settings()
    assert (settings.num_clients, settings.fraction_train) == (50, 0.2)
    assert (settings.lr, settings.lr_decay, settings.lr_decay_per) == (0.01, 0.999, "version")
    assert (settings.local_epochs, settings.batch_size) == (5, 64)
    assert (settings.latency, settings.latency_min, settings.latency_max) == ("uniform", 10, 500)
    assert (settings.latency_per, settings.virtual_days) == ("client", 10.0)
    assert (settings.buffer_size, settings.queue_size) == (5, 50)
    assert (settings.gamma, settings.delta, settings.sketch_dim) == (5.0, 0.5, 16)


def test_round_trip():
    settings = Settings.from_run_config({"dataset": "fmnist", "dirichlet-alpha": 0.1, "gamma": 3})
    assert settings.dirichlet_alpha == 0.1
    assert settings.gamma == 3.0
    assert isinstance(settings.gamma, float)
    assert Settings.from_run_config(settings.to_run_config()) == settings


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"strategy": "sgd"}, ["strategy='sgd'", "'fedpsa'"]),
        ({"num-clients": 0}, ["num-clients=0", "at least 1"]),
        ({"num-clients": 2.5}, ["num-clients=2.5", "int"]),
        ({"lr": "fast"}, ["lr='fast'", "float", "above 0"]),
        ({"lr": float("nan")}, ["lr=nan"]),
        ({"lr": 0.0}, ["lr=0.0", "above 0"]),
        ({"thermometer": 1}, ["thermometer=1", "bool"]),
        ({"seed": True}, ["seed=True", "int"]),
        ({"test-fraction": 0.9}, ["test-fraction=0.9", "at most 0.5"]),
        ({"no-such-key": 1}, ["no-such-key", "dirichlet-alpha"]),
        ({"latency-min": 600}, ["latency-min=600", "latency-max=500"]),
        ({"gamma": 0.0, "delta": 0.0}, ["gamma=0", "delta=0"]),
        ({"max-in-flight": 51}, ["max-in-flight=51", "num-clients=50"]),
        ({"min-nodes": 51}, ["min-nodes=51", "num-clients=50"]),
        ({"calibration": "real"}, ["calibration='real'", "calibration-transport='arrays'"]),
        ({"virtual-days": 0.0}, ["never end", "num-server-rounds"]),
        ({"clock": "wall"}, ["never end", "time-limit"]),
    ],
)
def test_impossible_settings_are_refused_with_key_value_and_what_is_allowed(config, parts):
    with pytest.raises(SettingsError) as error:
        Settings.from_run_config(config)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("calibration", ["gaussian", "real"])
@pytest.mark.parametrize("step", ["eager", "compiled"])
def test_the_step_decides_what_computes_the_sensitivity(tmp_path, calibration, step):
    settings = Settings(calibration=calibration, step=step, cache_dir=str(tmp_path))
    task = make_task(settings)
    assert make_probe(settings, task, task.make_model(0)).compiled == (step == "compiled")
