import math
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpsa_strategy import FedAsync
from fedpsa_strategy.checks import key_of
from fedpsa_strategy.methods.fedbuff import FedBuffMethod
from fedpsa_strategy.methods.registry import METHODS
from fedpsa_strategy.server.callbacks.privacy import weight_of
from server_app.method_settings import SettingsError
from server_app.no_effect import without_effect
from server_app.settings import PAPER_DEFAULTS, Settings
from server_app.settings_page import with_run_config

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_pyproject_holds_every_setting_as_it_is_declared():
    text = PYPROJECT.read_text()
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    assert config == Settings().to_run_config()
    assert with_run_config(text) == text, "python -m server_app.settings_page --pyproject"


def test_the_defaults_are_the_papers():
    settings = Settings()
    assert (settings.num_clients, settings.fraction_train) == (50, 0.2)
    assert (settings.lr_decay, settings.lr_decay_per, settings.local_epochs) == (
        0.999,
        "version",
        5,
    )
    assert PAPER_DEFAULTS == {"lr": 0.01, "batch-size": 64, "evaluate-every": 10}
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
        ({"strategy": "sgd"}, ["strategy = 'sgd': must be one of 'fedpsa', "]),
        ({"strategy": "fedspa"}, ["did you mean 'fedpsa'?"]),
        ({"num-clients": 0}, ["num-clients = 0: must be at least 1 and at most 1,000,000"]),
        ({"num-clients": 2.5}, ["num-clients = 2.5: must be a whole number, at least 1"]),
        ({"num-clients": 1618}, ["num-clients = 1618: must be at most 1617", "'digits'"]),
        ({"lr": "fast"}, ["lr = 'fast': must be a number, above 0"]),
        ({"lr": float("nan")}, ["lr = nan: must be a finite number above 0"]),
        ({"lr": -1}, ["lr = -1.0: must be above 0"]),
        ({"lr": 10**400}, ["lr = inf: must be a finite number above 0"]),
        ({"lr": 1e300}, ["lr = 1e+300: must be at most 1,000,000,000"]),
        ({"local-epochs": 2**31}, ["local-epochs = 2147483648: must be at most 2,147,483,647"]),
        ({"batch-size": -1}, ["batch-size = -1: must be at least 1, or 0 for the task's own"]),
        ({"thermometer": 1}, ["thermometer = 1: must be true or false"]),
        ({"seed": True}, ["seed = True: must be a whole number"]),
        ({"seed": 10**5000}, ["seed = a number of thousands of digits: must be at least 0"]),
        ({"test-fraction": 0.9}, ["test-fraction = 0.9: must be above 0 and at most 0.5"]),
        ({"test-fraction": 1e-30}, ["test-fraction = 1e-30: must be at least 0.00056", "digits"]),
        ({"device": "gpu"}, ["device = 'gpu': must be auto, cpu, cuda or cuda:N"]),
        ({"data-dir": "a\0b"}, ["data-dir = 'a\\x00b': must be printable text"]),
        ({"evaluate-interval": 1e-300}, ["evaluate-interval = 1e-300: must be 0 or at least 0.1"]),
        ({"task": "my task"}, ["task = 'my task': must be module or module:object"]),
        ({"task": "task"}, ["task = 'task': 'task' is a package of this repository"]),
        ({"task": "server_app.app:app"}, ["'server_app' is a package of this repository"]),
        ({"no-such-key": 1}, ["there is no setting 'no-such-key'", "docs/SETTINGS.md"]),
        ({"learning-rate": 1}, ["there is no setting 'learning-rate': did you mean lr?"]),
        ({"lerning-rate": 1}, ["did you mean lr?"]),
        ({"batch_size": 1}, ["did you mean batch-size?"]),
        ({"BatchSize": 1}, ["did you mean batch-size"]),
        ({"Epochs": 1}, ["did you mean local-epochs?"]),
        ({"latency-min": 600}, ["latency-min = 600: must be at most latency-max = 500"]),
        ({"gamma": 0.0, "delta": 0.0}, ["gamma=0", "delta=0"]),
        ({"max-in-flight": 51}, ["max-in-flight = 51: must be at most num-clients = 50"]),
        ({"min-nodes": 51}, ["min-nodes = 51: must be at most num-clients = 50"]),
        ({"calibration": "real"}, ["calibration='real'", "calibration-transport='arrays'"]),
        (
            {"calibration": "real", "calibration-transport": "arrays", "held-out": 63},
            ["held-out = 63: a real calibration batch of 64 samples", "must be at least 64"],
        ),
        ({"virtual-days": 0.0}, ["never end", "num-server-rounds"]),
        ({"clock": "wall"}, ["never end", "time-limit"]),
    ],
)
def test_impossible_settings_are_refused_with_key_value_and_what_is_allowed(config, parts):
    with pytest.raises(SettingsError) as error:
        Settings.from_run_config(config)
    for part in parts:
        assert part in str(error.value)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_value_is_a_setting_or_refused_in_one_short_sentence(data):
    item = data.draw(st.sampled_from(fields(Settings)))
    numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63])
    value = data.draw(numbers | st.booleans() | st.text() | st.none() | st.lists(st.integers()))
    key = key_of(item.name)
    sentence = ""
    try:
        found = Settings.from_run_config({key: value}).to_run_config()[key]
    except SettingsError as error:
        sentence = str(error)
    if sentence:
        assert key in sentence
        assert sentence.isprintable()
        assert len(sentence) < 300
    else:
        assert type(found) is type(item.default)
        assert not isinstance(found, int | float) or math.isfinite(found)


PRIVATE = {
    "strategy": "fedbuff",
    "dp-noise-multiplier": 1.0,
    "dp-clip": 0.5,
    "dp-max-participations": 3,
}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"dp-clip": 0.0}, "needs dp-clip"),
        ({"dp-max-participations": 0}, "needs dp-max-participations"),
        ({"strategy": "fedpsa"}, "with strategy 'fedpsa' it is not known how much"),
        ({"strategy": "ca2fl"}, "with strategy 'ca2fl' it is not known how much"),
        ({"max-update-ratio": 3.0}, "dp-clip is the limit"),
        ({"max-update-norm": 3.0}, "dp-clip is the limit"),
        ({"clock": "wall", "time-limit": 9.0}, "needs checkpoint-versions = 1"),
    ],
)
def test_what_would_not_be_private_is_refused(config, part):
    Settings.from_run_config(PRIVATE)
    with pytest.raises(SettingsError, match=part):
        Settings.from_run_config(PRIVATE | config)


def test_who_can_be_private_is_what_the_methods_say(monkeypatch):
    known = [method for method in METHODS.values() if weight_of(method()) is not None]
    page = (PYPROJECT.parent / "docs" / "PRIVACY.md").read_text()
    labels = " and ".join(method.label for method in known)
    assert f"All methods but {labels} are refused" in page
    monkeypatch.setitem(METHODS, "theirs", FedBuffMethod)
    names = " and ".join(repr(name) for name in [*(method.name for method in known), "theirs"])
    with pytest.raises(SettingsError, match=f"; {names} can be private"):
        Settings.from_run_config(PRIVATE | {"strategy": "fedpsa"})


@pytest.mark.parametrize("text", ["false", "False", False])
def test_a_run_is_not_resumed_from_a_folder_called_false(text):
    assert Settings.from_run_config({"resume": text}).resume == ""


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            {"mixing": 0.3},
            "mixing = 0.3 has no effect: strategy 'fedpsa' does not read it (fedasync",
        ),
        ({"strategy": "fedavg", "buffer-size": 7}, "buffer-size = 7 has no effect"),
        ({"task": "mine", "dirichlet-alpha": 0.1}, "task 'mine' brings its own data"),
        ({"partition": "iid", "dirichlet-alpha": 0.1}, "partition is 'iid'"),
        ({"clock": "wall", "time-limit": 1.0, "latency": "long-tail"}, "clock 'wall'"),
        ({"min-nodes": 3}, "min-nodes = 3 has no effect"),
        ({"max-in-flight": 3, "fraction-train": 0.5}, "max-in-flight takes its place"),
        ({"evaluate-interval": 5.0, "evaluate-every": 3}, "evaluate-interval takes its place"),
        ({"thermometer": False, "gamma": 3.0}, "thermometer is false"),
        ({"strategy": "fedasync", "hinge-slope": 3.0}, "staleness is 'polynomial'"),
        ({"norm-action": "clip"}, "neither max-update-norm nor max-update-ratio"),
        ({"audit-tolerance": 0.1}, "audit-fraction is 0"),
        ({"dp-clip": 0.1}, "dp-noise-multiplier is 0"),
    ],
)
def test_a_setting_without_effect_is_named(config, part):
    (sentence,) = without_effect(Settings.from_run_config(config))
    assert part in sentence


def test_settings_with_an_effect_are_not_warned_of():
    assert without_effect(Settings()) == []
    config = {"strategy": "fedavg", "buffer-size": 7, "lr-decay-per": "upload"}
    assert without_effect(Settings.from_run_config(config)) == []


def test_the_library_refuses_in_the_same_words():
    with pytest.raises(ValueError, match=r"^mixing = -1\.0: must be above 0 and at most 1$"):
        FedAsync(mixing=-1.0)
    with pytest.raises(SettingsError, match=r"^mixing = -1\.0: must be above 0 and at most 1$"):
        Settings.from_run_config({"mixing": -1.0})
