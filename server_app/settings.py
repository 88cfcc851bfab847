"""The run config, checked before anything happens.

Every setting is declared once, here, with its default, its range and what it means;
`pyproject.toml` repeats the defaults for Flower, and a test holds the two together.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from fedpsa_strategy.checks import in_range, number_text, out_of_range, range_text, shown

METHODS = ("fedpsa", "fedavg", "fedasync", "fedbuff", "ca2fl", "fedfa", "fedpac")
DATASETS = ("digits", "mnist", "fmnist", "cifar10", "cifar100")
# What a resumed run may set differently: when it ends, what it waits for, and where things are.
MAY_CHANGE = {
    "num-server-rounds",
    "virtual-days",
    "time-limit",
    "target-accuracy",
    "min-nodes",
    "node-timeout",
    "reply-timeout",
    "checkpoint-versions",
    "checkpoint-seconds",
    "checkpoint-keep",
    "resume",
    "run-dir",
    "data-dir",
    "cache-dir",
    "status-interval",
    "tensorboard",
}
# Datasets whose model has an encoder before its head.
_WITH_ENCODER = ("digits", "mnist", "cifar10", "cifar100")
# How many samples there are to share out, those for testing included.
_SAMPLES = {"digits": 1797, "mnist": 70_000, "fmnist": 70_000, "cifar10": 60_000}
_SAMPLES["cifar100"] = _SAMPLES["cifar10"]
# Numbers beyond these are slips; they would end in an overflow somewhere.
_LARGEST = {int: 2**31 - 1, float: 1e9}
# What people call settings elsewhere.
_SYNONYMS = {
    "learning-rate": "lr",
    "eta": "lr",
    "step-size": "lr",
    "lr-schedule": "lr-decay",
    "epochs": "local-epochs",
    "num-epochs": "local-epochs",
    "minibatch-size": "batch-size",
    "bs": "batch-size",
    "rounds": "num-server-rounds",
    "num-rounds": "num-server-rounds",
    "versions": "num-server-rounds",
    "clients": "num-clients",
    "num-nodes": "num-clients",
    "num-supernodes": "num-clients",
    "nodes": "num-clients",
    "alpha": "dirichlet-alpha",
    "method": "strategy",
    "algorithm": "strategy",
    "data": "dataset",
    "model": "task",
    "days": "virtual-days",
    "timeout": "reply-timeout",
    "concurrency": "max-in-flight",
    "fraction-fit": "fraction-train",
    "mu": "proximal",
    "rho": "proximal",
    "random-seed": "seed",
    "output-dir": "run-dir",
    "checkpoint": "resume",
    "eval-every": "evaluate-every",
}
# The packages of this repository: none of them is somebody's own task.
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

READ_BY: dict[str, tuple[str, ...]] = {
    "buffer-size": ("fedpsa", "fedbuff", "ca2fl", "fedfa"),
    "server-lr": ("fedbuff", "ca2fl"),
    "staleness-exponent": ("fedbuff", "fedasync"),
    "memory": ("ca2fl",),
    **dict.fromkeys(
        ("queue-size", "gamma", "delta", "thermometer", "signal", "alignment-every"), ("fedpsa",)
    ),
    **dict.fromkeys(("sketch-dim", "sketch-kind", "sketch-seed"), ("fedpsa",)),
    **dict.fromkeys(("calibration", "calibration-size", "calibration-seed"), ("fedpsa",)),
    **dict.fromkeys(("calibration-transport", "audit-fraction", "audit-tolerance"), ("fedpsa",)),
    **dict.fromkeys(("mixing", "staleness", "hinge-slope"), ("fedasync",)),
    **dict.fromkeys(("hinge-threshold", "proximal"), ("fedasync",)),
    **dict.fromkeys(("alignment", "head-lr", "head-epochs"), ("fedpac",)),
}
"""The methods that read a setting; all read those that are not listed."""


class SettingsError(ValueError):
    """A setting that cannot be used; the text names it, its value and what is allowed."""


def _setting(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    form: tuple[str, str] | None = None,
    zero: str = "",
) -> Any:
    """Declare a setting.

    `form` is a regular expression and what it says in words, `zero` what 0 stands for where it is
    outside the range.
    """
    limits = {"choices": choices, "least": least, "above": above, "most": most}
    metadata = {"meaning": meaning, "form": form, "zero": zero, **limits}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """All settings of a run; the run-config key is the field's name with dashes."""

    # What is trained
    strategy: str = _setting("fedpsa", "aggregation method", choices=METHODS)
    dataset: str = _setting("digits", "what is learned", choices=DATASETS)
    task: str = _setting(
        "",
        "own model and data, as module:object (docs/OWN_TASK.md); empty: the dataset",
        form=(r"([^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?)?", "module or module:object"),
    )
    num_clients: int = _setting(
        50,
        "clients; with the virtual clock exactly so many nodes must take part",
        least=1,
        most=1_000_000,
    )
    partition: str = _setting(
        "client-dirichlet",
        "how data is split: equal sizes with a Dirichlet class mixture per client, the textbook's "
        "Dirichlet per class, or evenly",
        choices=("client-dirichlet", "class-dirichlet", "iid"),
    )
    dirichlet_alpha: float = _setting(
        0.5, "concentration of the Dirichlet partition; smaller is more skewed", above=0
    )
    test_fraction: float = _setting(
        0.1, "share of all samples that the server tests on", above=0, most=0.5
    )
    seed: int = _setting(0, "seed of everything random in a run", least=0, most=2**63 - 1)

    # Local training
    lr: float = _setting(
        0.0,
        "learning rate of the clients' SGD; 0: the task's own (digits 0.1, others 0.01)",
        above=0,
        zero="the task's own",
    )
    lr_decay: float = _setting(0.999, "factor of the learning rate per version", above=0, most=1)
    lr_decay_per: str = _setting(
        "version",
        "what the decay counts: versions, or uploads / buffer-size (the fair comparison of methods "
        "that make a version of every upload)",
        choices=("version", "upload"),
    )
    local_epochs: int = _setting(5, "epochs of local training per task", least=1)
    batch_size: int = _setting(
        0,
        "samples per local step; 0: the task's own (digits 16, others 64)",
        least=1,
        zero="the task's own",
    )
    step: str = _setting(
        "eager",
        "training step: eager, or compiled by torch.compile (for small models; convolutions gain "
        "nothing)",
        choices=("eager", "compiled"),
    )
    update_dtype: str = _setting(
        "float32",
        "number format in which clients send updates; the other two halve the bytes",
        choices=("float32", "float16", "bfloat16"),
    )
    device: str = _setting(
        "auto",
        "auto (CUDA where there is one), cpu, cuda, cuda:N",
        form=(r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda or cuda:N"),
    )
    threads: int = _setting(1, "CPU threads of each process", least=1, most=1024)

    # Who works when
    fraction_train: float = _setting(0.2, "share of the nodes kept busy", above=0, most=1)
    max_in_flight: int = _setting(0, "number of nodes kept busy instead; 0: the share", least=0)
    fraction_evaluate: float = _setting(
        0.0,
        "share of the nodes that evaluates each evaluated version on its own data",
        least=0,
        most=1,
    )
    clock: str = _setting("virtual", "simulated or real time", choices=("virtual", "wall"))
    latency: str = _setting(
        "uniform",
        "law of the simulated response times",
        choices=("uniform", "long-tail", "constant"),
    )
    latency_min: int = _setting(10, "shortest response time in virtual units", least=1)
    latency_max: int = _setting(500, "longest response time in virtual units", least=1)
    latency_per: str = _setting(
        "client", "drawn once per client, or anew per task", choices=("client", "task")
    )

    # When it ends, and what is looked at on the way
    num_server_rounds: int = _setting(0, "stop after so many versions; 0: no such limit", least=0)
    virtual_days: float = _setting(
        10.0, "stop after so many virtual days of 86,400 units; 0: no such limit", least=0
    )
    time_limit: float = _setting(0.0, "stop after so many real seconds; 0: no such limit", least=0)
    target_accuracy: float = _setting(
        0.0, "stop at this test accuracy; 0: no such limit", least=0, most=1
    )
    evaluate_every: int = _setting(
        0,
        "test every so many versions; 0: the task's own (digits 5, others 10)",
        least=1,
        zero="the task's own",
    )
    evaluate_interval: float = _setting(
        0.0, "test every so many units of the clock instead; 0: by versions", least=0
    )

    # The methods
    buffer_size: int = _setting(
        5,
        "L_s (FedPSA), K (FedBuff, CA2FL): uploads per version; FedFa: models in the window",
        least=1,
    )
    queue_size: int = _setting(50, "L_q: length of the thermometer's queue", least=1)
    gamma: float = _setting(5.0, "γ: weight of the update norms in the temperature", least=0)
    delta: float = _setting(0.5, "δ: floor of the temperature", least=0)
    thermometer: bool = _setting(True, "false: the ablation with constant temperature 1")
    signal: str = _setting(
        "sensitivity",
        "what is sketched: sensitivities, or raw parameters (ablation)",
        choices=("sensitivity", "parameters"),
    )
    sketch_dim: int = _setting(16, "k: length of the sketch", least=1, most=1024)
    sketch_kind: str = _setting(
        "rademacher", "law of the projection", choices=("rademacher", "gaussian")
    )
    sketch_seed: int = _setting(0, "seed of the projection", least=0, most=2**63 - 1)
    calibration: str = _setting(
        "gaussian",
        "calibration batch: Gaussian noise, or samples of the training distribution",
        choices=("gaussian", "real"),
    )
    calibration_size: int = _setting(64, "samples in the calibration batch", least=16, most=512)
    calibration_seed: int = _setting(0, "seed of the calibration batch", least=0, most=2**63 - 1)
    calibration_transport: str = _setting(
        "seed",
        "nodes draw the batch from its seed, or get it sent once (always so for real batches)",
        choices=("seed", "arrays"),
    )
    alignment_every: int = _setting(
        0,
        "FedPSA: record with every so many uploads how well the gradients of client and server "
        "agree on test data; 0: never",
        least=0,
    )
    server_lr: float = _setting(1.0, "FedBuff, CA2FL: factor of the aggregated step", above=0)
    staleness_exponent: float = _setting(
        0.5,
        "FedBuff, FedAsync: a in the staleness factor (1+τ)^-a; 0 is the uniform buffer",
        least=0,
    )
    mixing: float = _setting(0.6, "FedAsync: α, the weight of a fresh upload", above=0, most=1)
    staleness: str = _setting(
        "polynomial",
        "FedAsync: law of the staleness factor",
        choices=("polynomial", "constant", "hinge"),
    )
    hinge_slope: float = _setting(10.0, "FedAsync: a of the hinge", least=0)
    hinge_threshold: float = _setting(4.0, "FedAsync: b of the hinge", least=0)
    proximal: float = _setting(0.005, "FedAsync: ρ of the clients' proximal term", least=0)
    memory: str = _setting(
        "ram",
        "CA2FL: where the clients' last updates are kept, in memory or in a file of run-dir",
        choices=("ram", "file"),
    )
    alignment: float = _setting(1.0, "FedPAC: λ, weight of the distance to the centroids", least=0)
    head_lr: float = _setting(0.1, "FedPAC: learning rate of the head", above=0)
    head_epochs: int = _setting(1, "FedPAC: epochs of the head's training", least=0)

    # Nodes that fail
    min_nodes: int = _setting(
        0, "wall clock: wait for so many nodes before starting; 0: num-clients", least=0
    )
    node_timeout: float = _setting(120.0, "seconds to wait for nodes before giving up", above=0)
    reply_timeout: float = _setting(
        3600.0,
        "seconds after which a client's reply is no longer waited for; virtual clock: after the"
        " last reply of any client",
        above=0,
    )
    max_failures: int = _setting(
        3, "failures in a row after which a node is left out for a while", least=1
    )
    failure_pause: float = _setting(
        600.0, "for how long it is left out, in units of the clock", above=0
    )

    max_update_norm: float = _setting(0.0, "largest norm of an update; 0: no such limit", least=0)
    max_update_ratio: float = _setting(
        0.0, "largest multiple of the clients' median norm; 0: no such limit", least=0
    )
    norm_action: str = _setting(
        "reject", "what happens to larger updates", choices=("reject", "clip")
    )
    audit_fraction: float = _setting(
        0.0, "FedPSA: share of the uploads whose sketch the server recomputes", least=0, most=1
    )
    audit_tolerance: float = _setting(
        0.001, "FedPSA: how far off, relative to its length, an audited sketch may be", least=0
    )

    # Checkpoints
    checkpoint_versions: int = _setting(
        0, "save the run's state every so many versions; 0: not by versions", least=0
    )
    checkpoint_seconds: float = _setting(
        30.0, "save the run's state every so many real seconds; 0: not by time", least=0
    )
    checkpoint_keep: int = _setting(2, "checkpoints that are kept", least=1)
    resume: str = _setting(
        "", "true: go on from the newest checkpoint in run-dir; or the path of a run or checkpoint"
    )

    # Places
    run_dir: str = _setting(
        "",
        "absolute path of the run's folder; empty: <time>-<strategy>-<dataset or task> in runs/ if"
        " the server works in this app's folder, else in ~/.local/state/fedpsa/runs",
    )
    data_dir: str = _setting("", "where dataset files are; empty: the user's cache folder")
    cache_dir: str = _setting("", "where prepared arrays are kept; empty: the user's cache folder")
    tensorboard: bool = _setting(
        False,
        "also write TensorBoard events to run-dir/tensorboard (pip install tensorboard)",
    )
    status_interval: float = _setting(3.0, "seconds between status lines", above=0)

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Settings:
        """Return the settings of a run config.

        Raises
        ------
        SettingsError
            For an unknown key, a value of the wrong type or out of range, or settings that do not
            fit together.
        """
        known = {key_of(item.name): item for item in fields(cls)}
        values = {}
        for key, value in run_config.items():
            if key not in known:
                similar = " or ".join(similar_keys(key, known))
                hint = f"did you mean {similar}?" if similar else "docs/SETTINGS.md lists them all"
                raise SettingsError(f"there is no setting {shown(key)}: {hint}")
            if key == "resume" and str(value).lower() in ("true", "false"):
                value = "true" if str(value).lower() == "true" else ""
            values[known[key].name] = _checked(key, value, known[key])
        settings = cls(**values)
        settings._check_combinations()
        return settings

    def to_run_config(self) -> dict[str, Any]:
        """Return all settings with their run-config keys."""
        return {key_of(name): value for name, value in asdict(self).items()}

    def changed_since(self, run_config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the settings that matter and differ from an earlier run's: key -> (then, now).

        A setting that did not exist at the time of the earlier run had its default's effect.
        """
        now, then = self.to_run_config(), {**Settings().to_run_config(), **run_config}
        keys = (now.keys() | then.keys()) - MAY_CHANGE
        pairs = {key: (then.get(key), now.get(key)) for key in sorted(keys)}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def data_name(self) -> str:
        """The name of what is learned: an own task, or the dataset."""
        return self.task or self.dataset

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

        Parameters
        ----------
        own : Mapping[str, Any]
            Values by their run-config keys; others than those in `PAPER_DEFAULTS` are ignored.
        """
        values = {key: own.get(key) or usual for key, usual in PAPER_DEFAULTS.items()}
        names = {key.replace("-", "_"): value for key, value in values.items()}
        return replace(self, **{k: v for k, v in names.items() if not getattr(self, k)})

    def without_effect(self) -> list[str]:
        """Return a sentence about every setting that was changed and changes nothing here."""
        values, defaults = self.to_run_config(), Settings().to_run_config()
        reasons = self._reasons_for_no_effect()
        return [
            f"{key} = {shown(values[key])} has no effect: {reason}"
            for key, reason in reasons.items()
            if values[key] != defaults[key]
        ]

    def _reasons_for_no_effect(self) -> dict[str, str]:
        reasons: dict[str, str] = {}

        def note(useless: bool, reason: str, *keys: str) -> None:
            if useless:
                reasons.update({key: reason for key in keys if key not in reasons})

        for key, methods in READ_BY.items():
            by_upload = key == "buffer-size" and self.lr_decay_per == "upload"
            readers = ", ".join(methods)
            note(
                self.strategy not in methods and not by_upload,
                f"strategy {self.strategy!r} does not read it ({readers} would)",
                key,
            )
        note(
            bool(self.task),
            f"task {self.task!r} brings its own data",
            *("dataset", "partition", "dirichlet-alpha", "test-fraction", "data-dir", "cache-dir"),
        )
        note(self.partition == "iid", "partition is 'iid'", "dirichlet-alpha")
        note(
            self.clock == "wall",
            "response times are real with clock 'wall'",
            *("latency", "latency-min", "latency-max", "latency-per", "virtual-days"),
        )
        note(self.clock == "virtual", "with clock 'virtual' all num-clients take part", "min-nodes")
        note(self.latency == "constant", "latency is 'constant': latency-max", "latency-min")
        note(self.max_in_flight > 0, "max-in-flight takes its place", "fraction-train")
        note(self.evaluate_interval > 0, "evaluate-interval takes its place", "evaluate-every")
        note(not self.thermometer, "thermometer is false", "queue-size", "gamma", "delta")
        note(
            self.strategy == "fedasync" and self.staleness != "polynomial",
            f"staleness is {self.staleness!r}",
            "staleness-exponent",
        )
        note(
            self.staleness != "hinge",
            f"staleness is {self.staleness!r}",
            *("hinge-slope", "hinge-threshold"),
        )
        note(
            not (self.max_update_norm or self.max_update_ratio),
            "neither max-update-norm nor max-update-ratio is set",
            "norm-action",
        )
        note(not self.audit_fraction, "audit-fraction is 0", "audit-tolerance")
        return reasons

    def _check_combinations(self) -> None:
        if self.task.partition(":")[0].partition(".")[0] in _OUR_PACKAGES:
            package = self.task.partition(":")[0].partition(".")[0]
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
        if self.latency_min > self.latency_max:
            raise SettingsError(
                f"latency-min = {self.latency_min}: must be at most latency-max = "
                f"{self.latency_max}"
            )
        if self.gamma + self.delta == 0:
            raise SettingsError("gamma=0 and delta=0 make the temperature 0: raise one of them")
        if self.max_in_flight > self.num_clients:
            raise SettingsError(
                f"max-in-flight = {self.max_in_flight}: must be at most num-clients = "
                f"{self.num_clients}"
            )
        if self.min_nodes > self.num_clients:
            raise SettingsError(
                f"min-nodes = {self.min_nodes}: must be at most num-clients = {self.num_clients}"
            )
        if self.calibration == "real" and self.calibration_transport == "seed":
            raise SettingsError(
                "calibration='real' cannot be drawn from a seed: set calibration-transport='arrays'"
            )
        if self.strategy == "fedpac" and not self.task and self.dataset not in _WITH_ENCODER:
            raise SettingsError(
                f"strategy='fedpac' needs a model with an encoder and a head, but the one of "
                f"dataset={self.dataset!r} is a single layer: choose one of {_WITH_ENCODER}"
            )
        if self.strategy == "fedpac" and self.step == "compiled":
            raise SettingsError("strategy='fedpac' trains in two phases: use step='eager'")
        if self.resume and not self.run_dir:
            raise SettingsError(f"resume={self.resume!r} needs run-dir, the folder of that run")
        bounded = self.num_server_rounds or self.time_limit or self.target_accuracy
        if not (bounded or (self.clock == "virtual" and self.virtual_days)):
            raise SettingsError(
                "the run would never end: set num-server-rounds, time-limit, target-accuracy or, "
                "with the virtual clock, virtual-days"
            )


def key_of(name: str) -> str:
    """Return the run-config key of a field."""
    return name.replace("_", "-")


def describe_range(metadata: Mapping[str, Any]) -> str:
    """Return what a setting allows, in words."""
    if metadata["choices"]:
        return "one of " + ", ".join(repr(choice) for choice in metadata["choices"])
    if metadata["form"]:
        return str(metadata["form"][1])
    allowed = range_text(**_bounds(metadata)) or "any"
    return f"{allowed}, or 0 for {metadata['zero']}" if metadata["zero"] else allowed


def similar_keys(key: str, known: Iterable[str]) -> list[str]:
    """Return the one or two of the `known` keys that somebody who wrote `key` may have meant."""
    names = {name.lower().replace("_", "-"): name for name in known}
    names |= {word: names[name] for word, name in _SYNONYMS.items() if name in names}
    plain = re.sub(r"[\s_.]+", "-", key.strip().lower())
    close = [plain] if plain in names else difflib.get_close_matches(plain, names, 2, cutoff=0.7)
    return list(dict.fromkeys(names[name] for name in close))


def _bounds(metadata: Mapping[str, Any]) -> dict[str, float]:
    limits = {name: metadata[name] for name in ("least", "above", "most")}
    return {name: value for name, value in limits.items() if value is not None}


def _checked(key: str, value: Any, item: Any) -> Any:
    """Return the value as the setting's type, if it is allowed."""
    kind, metadata = type(item.default), item.metadata
    allowed = describe_range(metadata)
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    if type(value) is not kind:
        word = _KINDS[kind] if allowed == "any" else f"{_KINDS[kind]}, {allowed}"
        raise SettingsError(f"{key} = {shown(value)}: must be {word}")
    if metadata["choices"] is not None and value not in metadata["choices"]:
        close = difflib.get_close_matches(value, metadata["choices"], n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise SettingsError(f"{key} = {shown(value)}: must be {allowed}{hint}")
    if kind is str:
        form = metadata["form"]
        if form is not None and not re.fullmatch(form[0], value):
            raise SettingsError(f"{key} = {shown(value)}: must be {allowed}")
        if not value.isprintable():
            raise SettingsError(f"{key} = {shown(value)}: must be printable text")
    if kind in _LARGEST and not (metadata["zero"] and value == 0):
        if not in_range(value, **_bounds(metadata)):
            raise SettingsError(out_of_range(key, value, "" if allowed == "any" else allowed))
        if metadata["most"] is None and value > _LARGEST[kind]:
            raise SettingsError(out_of_range(key, value, f"at most {number_text(_LARGEST[kind])}"))
    return value


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
