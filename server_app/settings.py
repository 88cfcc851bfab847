"""The run config, checked before anything happens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from fedpsa_strategy.checks import key_of, shown
from fedpsa_strategy.methods.base import Method
from fedpsa_strategy.methods.registry import (
    find_method,
    is_ours,
    readers,
)
from server_app.declared import DATASETS, Declared
from server_app.method_settings import SettingsError, as_text, checked, method_values
from server_app.privacy import why_not_private
from server_app.setting_names import hint_for

__all__ = [
    "DATASETS",
    "DATASET_DEFAULTS",
    "MAY_CHANGE",
    "PAPER_DEFAULTS",
    "Settings",
    "SettingsError",
]

# What a resumed run may set differently: when it ends, what it waits for, and where things are.
MAY_CHANGE = {
    "num-server-rounds",
    "virtual-days",
    "time-limit",
    "target-accuracy",
    "min-nodes",
    "node-timeout",
    "reply-timeout",
    "overdue-factor",
    "overdue-floor",
    "overdue-ceiling",
    "checkpoint-versions",
    "checkpoint-seconds",
    "checkpoint-keep",
    "events-part-mb",
    "resume",
    "run-dir",
    "tags",
    "data-dir",
    "cache-dir",
    "status-interval",
    "tensorboard",
    "mlflow",
    "wandb",
    "prometheus",
}
# Datasets whose own model has an encoder before its head.
_WITH_ENCODER = ("digits", "mnist", "cifar10", "cifar100")
# How many samples there are to share out, those for testing included.
_SAMPLES = {"digits": 1797, "mnist": 70_000, "fmnist": 70_000, "cifar10": 60_000}
_SAMPLES["cifar100"] = _SAMPLES["cifar10"]
# The packages of this repository: none of them is a user's own task.
_OUR_PACKAGES = (
    "benchmarks",
    "client_app",
    "fedpsa_strategy",
    "server_app",
    "simulation",
    "task",
)

PAPER_DEFAULTS: dict[str, Any] = {"lr": 0.01, "batch-size": 64, "evaluate-every": 10}
"""What 0 stands for in these settings, unless the task says otherwise."""
DATASET_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"lr": 0.1, "batch-size": 16, "evaluate-every": 5}
}
"""What 0 stands for with datasets that are not the paper's."""


@dataclass(frozen=True)
class Settings(Declared):
    """The settings of a run, which fit together if they come from a run config."""

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Settings:
        """Return the settings of a run config.

        `SettingsError` names an unknown key, a value of the wrong type or out of range, or settings
        that do not fit together.
        """
        known = {key_of(item.name): item for item in fields(cls)}
        values = {}
        for key, value in run_config.items():
            if key not in known:
                hint = hint_for(key, known, "docs/SETTINGS.md lists them all")
                raise SettingsError(f"there is no setting {shown(key)}: {hint}")
            if key == "resume" and str(value).lower() in ("true", "false"):
                value = "true" if str(value).lower() == "true" else ""
            values[known[key].name] = checked(key, value, known[key])
        settings = cls(**values)
        settings._check_combinations()
        return settings

    def to_run_config(self) -> dict[str, Any]:
        """Return all settings with their run-config keys."""
        return {key_of(name): value for name, value in asdict(self).items()}

    def changed_since(self, run_config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the settings that matter and differ from an earlier run's: key -> (then, now)."""
        different = self.differences(run_config)
        return {key: pair for key, pair in different.items() if key not in MAY_CHANGE}

    def differences(self, run_config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return all settings that differ from those of an earlier run: key -> (then, now).

        A setting that did not exist at the time of the earlier run had its default's effect, or its
        former one's. How `method-settings` are written makes no difference.
        """
        now, read_by = self.to_run_config(), readers()
        former = {
            key: value
            for key, value in former_defaults().items()
            if self.strategy in read_by.get(key, (self.strategy,))
        }
        then = {**Settings().to_run_config(), **former, **run_config}
        pairs = {key: (then.get(key), now.get(key)) for key in sorted(now.keys() | then.keys())}
        found = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        if "method-settings" in found and "strategy" not in found:
            other = replace(self, method_settings=then["method-settings"])
            with suppress(SettingsError):  # what the method no longer takes differs
                if other.decisive_method_settings == self.decisive_method_settings:
                    del found["method-settings"]
        return found

    @cached_property
    def method(self) -> Method:
        """The method with its settings; `SettingsError` if one of them is not allowed."""
        try:
            kind = find_method(self.strategy)
            return kind(**self._method_values(kind))
        except ValueError as error:
            raise SettingsError(str(error)) from None

    def _method_values(self, kind: type[Method]) -> dict[str, Any]:
        """Return the values of a method's settings by their fields' names."""
        known = {key_of(item.name): item for item in fields(kind)}
        if is_ours(self.strategy):
            if self.method_settings:
                raise SettingsError(
                    f"method-settings = {shown(self.method_settings)}: strategy {self.strategy!r} "
                    f"has run-config keys of its own ({', '.join(known) or 'none'})"
                )
            return {item.name: getattr(self, item.name) for item in known.values()}
        return method_values(self.strategy, self.method_settings, known)

    @property
    def decisive_method_settings(self) -> str:
        """The settings of a user's own method that are not at their defaults, in one form."""
        if is_ours(self.strategy):
            return ""
        changed = {
            key_of(item.name): value
            for item in fields(self.method)
            if (value := getattr(self.method, item.name)) != item.default
        }
        return as_text(dict(sorted(changed.items())))

    @property
    def data_name(self) -> str:
        """The name of what is learned: an own task, or the dataset."""
        return self.task or self.dataset

    @property
    def has_encoder(self) -> bool:
        """Whether the model of the dataset has an encoder before its head."""
        return self.model == "mlp" or self.dataset in _WITH_ENCODER

    @property
    def rounds(self) -> int:
        """The largest number of versions, as Flower wants it."""
        return self.num_server_rounds or 2**31 - 1

    @property
    def is_resolved(self) -> bool:
        """Whether no setting waits for the task's own value."""
        return bool(self.lr and self.batch_size and self.evaluate_every)

    def resolved(self, own: Mapping[str, Any]) -> Settings:
        """Return the settings with a task's own values (or the paper's) where a 0 asks for them.

        The values are by their run-config keys; others than those in `PAPER_DEFAULTS` are ignored.
        """
        values = {key: own.get(key) or usual for key, usual in PAPER_DEFAULTS.items()}
        names = {key.replace("-", "_"): value for key, value in values.items()}
        return replace(self, **{k: v for k, v in names.items() if not getattr(self, k)})

    def _check_combinations(self) -> None:
        package = self.task.partition(":")[0].partition(".")[0]
        if package in _OUR_PACKAGES:
            raise SettingsError(
                f"task = {self.task!r}: {package!r} is a package of this repository; give a module "
                "of your own another name (docs/OWN_TASK.md)"
            )
        if not self.task:
            samples = _SAMPLES[self.dataset]
            tested = round(samples * self.test_fraction)
            if not tested:
                raise SettingsError(
                    f"test-fraction = {self.test_fraction!r}: must be at least {1 / samples:.2g}, "
                    f"a sample of dataset {self.dataset!r}"
                )
            samples -= tested
            if self.num_clients > samples:
                raise SettingsError(
                    f"num-clients = {self.num_clients}: must be at most {samples}, the training "
                    f"samples of dataset {self.dataset!r}"
                )
        if 0 < self.evaluate_interval < 0.1:
            raise SettingsError(
                f"evaluate-interval = {self.evaluate_interval!r}: must be 0 or at least 0.1"
            )
        for low, high in (
            ("latency-min", "latency-max"),
            ("max-in-flight", "num-clients"),
            ("min-nodes", "num-clients"),
            ("overdue-floor", "overdue-ceiling"),
        ):
            value, most = (getattr(self, key.replace("-", "_")) for key in (low, high))
            if value > most:
                raise SettingsError(f"{low} = {value}: must be at most {high} = {most}")
        method = self.method
        if not self.task and getattr(method, "calibration", "") == "real":
            size = getattr(method, "calibration_size", 0)
            if self.held_out < size:
                raise SettingsError(
                    f"held-out = {self.held_out}: a real calibration batch of {size} samples is "
                    f"drawn from training data that no client has: must be at least {size}"
                )
        if method.needs_head and not self.task and not self.has_encoder:
            raise SettingsError(
                f"strategy={self.strategy!r} needs a model with an encoder and a head, but the one "
                f"of dataset={self.dataset!r} is a single layer: choose one of {_WITH_ENCODER}, or "
                "model='mlp'"
            )
        if method.client_half and (self.step, self.autocast) != ("eager", "off"):
            raise SettingsError(
                f"strategy={self.strategy!r} trains in a way of its own: use step='eager' and "
                "autocast='off'"
            )
        if self.step == "compiled" and self.autocast != "off":
            raise SettingsError(f"autocast = {self.autocast!r}: needs step = 'eager'")
        if reason := why_not_private(self, self.method):
            raise SettingsError(reason)
        if self.resume and not self.run_dir:
            raise SettingsError(f"resume={self.resume!r} needs run-dir, the folder of that run")
        bounded = self.num_server_rounds or self.time_limit or self.target_accuracy
        if not (bounded or (self.clock == "virtual" and self.virtual_days)):
            raise SettingsError(
                "the run would never end: set num-server-rounds, time-limit, target-accuracy or, "
                "with the virtual clock, virtual-days"
            )


def former_defaults() -> dict[str, Any]:
    """Return what settings did in runs that are older than these settings, where that differs."""
    return {
        key_of(item.name): former
        for item in fields(Settings)
        if (former := item.metadata["former"]) is not None
    }
