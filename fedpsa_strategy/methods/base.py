"""What a method is: its settings, what it needs, and its rule, a pure object over NumPy vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np

from fedpsa_strategy.checks import check_settings, key_of, setting
from fedpsa_strategy.methods.given import Given, Update
from fedpsa_strategy.methods.saving import plain, restored
from fedpsa_strategy.methods.tables import Row, Variant
from fedpsa_strategy.methods.vectors import (
    Vector,
    blocks,
    cosine_of,
    effective_number,
    elementwise,
    inner_products,
    normalised,
    weighted_step,
)

__all__ = [
    "Buffered",
    "BufferedRule",
    "Given",
    "Method",
    "Row",
    "Rule",
    "Sketched",
    "SketchedRule",
    "Update",
    "Variant",
    "Vector",
    "blocks",
    "check_declared",
    "cosine_of",
    "effective_number",
    "elementwise",
    "inner_products",
    "normalised",
    "setting",
    "weighted_step",
]


@dataclass(frozen=True)
class Method:
    """An aggregation method; its fields are its settings, declared with `setting`.

    From these declarations come the names that `strategy=` takes, the run-config keys with their
    ranges, the pages about them, the identity of an experiment's cell, and labels and colours.

    Attributes
    ----------
    name : str
        What `strategy=` calls it; the class's name in lower case unless it says otherwise.
    label : str
        What tables and figures call it; the class's name unless it says otherwise.
    colour : str
        Its colour in figures, such as "#2f7fc1"; empty takes one that is free.
    rule : type[Rule]
        Its rule.
    rounds : bool
        Whether it works in rounds: clients are sampled together and all of them waited for.
    needs_sketch : bool
        Whether clients send a sketch with every update; see `Sketched`.
    remembers_clients : bool
        Whether the rule has a mapping `memory` with a vector for every client.
    client_half : str
        "module:function" that trains at the client instead of the app's ordinary training: called
        with (model, shard, message, lr=, epochs=, batch_size=, seed=, device=), it returns the mean
        loss and a dict of records for the reply. Empty for ordinary training.
    needs_head : bool
        Whether the model has to have an `encoder` and a linear `head`.
    variants : tuple[Variant, ...]
        Settings that tables show as a method of its own.
    table : Row
        Its row in docs/METHODS.md.
    """

    name: ClassVar[str] = ""
    label: ClassVar[str] = ""
    colour: ClassVar[str] = ""
    rule: ClassVar[type[Rule]]
    rounds: ClassVar[bool] = False
    needs_sketch: ClassVar[bool] = False
    remembers_clients: ClassVar[bool] = False
    client_half: ClassVar[str] = ""
    needs_head: ClassVar[bool] = False
    variants: ClassVar[tuple[Variant, ...]] = ()
    table: ClassVar[Row] = Row()

    def __init_subclass__(cls) -> None:
        for attribute, usual in (("name", cls.__name__.lower()), ("label", cls.__name__)):
            if not cls.__dict__.get(attribute):
                setattr(cls, attribute, usual)

    def __post_init__(self) -> None:
        check_settings(self)

    def make_rule(self, given: Given | None = None) -> Rule:
        """Return a rule with these settings."""
        return self.rule(self, given)

    def client_config(self) -> dict[str, Any]:
        """Return what clients are told beside the ordinary train config."""
        return {}

    def unread(self) -> dict[str, str]:
        """Return the settings that other settings make useless, with the reason."""
        return {}

    @property
    def largest_weight(self) -> float | None:
        """The largest factor with which one update is added to a version, for differential privacy.

        None, unless overridden: it is not known, or an update changes more than one version, or
        with which weights others are added.
        """
        return None

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> Self:
        """Return the method with those of the keyword arguments that are its settings.

        They are taken out of `arguments`.
        """
        own = {item.name for item in fields(cls)} & arguments.keys()
        return cls(**{name: arguments.pop(name) for name in own})

    @classmethod
    def setting_keys(cls) -> list[str]:
        """Return the run-config keys of its settings."""
        return [key_of(item.name) for item in fields(cls)]


def check_declared(method: type[Method]) -> None:
    """Refuse a method whose settings are not declared as they must be; raises TypeError."""
    if any(isinstance(value, Field) for value in vars(method).values()):
        raise TypeError(f"{method.__name__} has settings: it needs @dataclass(frozen=True)")
    for item in fields(method):
        if "meaning" not in item.metadata:
            raise TypeError(
                f"{method.__name__}.{item.name}: declare settings with setting(default, meaning)"
            )


@dataclass(frozen=True)
class Buffered(Method):
    """A method with a buffer."""

    buffer_size: int = setting(
        5, "K, L_s: uploads per version; FedFa: models in the window", least=1
    )


@dataclass(frozen=True)
class Sketched(Method):
    """A method whose clients send sketches: how these are made, and how far they are believed."""

    needs_sketch: ClassVar[bool] = True

    signal: str = setting(
        "sensitivity",
        "what is sketched: sensitivities, or raw parameters (ablation)",
        choices=("sensitivity", "parameters"),
    )
    sketch_dim: int = setting(16, "k: length of the sketch", least=1, most=1024)
    sketch_kind: str = setting(
        "rademacher", "law of the projection", choices=("rademacher", "gaussian")
    )
    sketch_seed: int = setting(0, "seed of the projection", least=0, most=2**63 - 1)
    calibration: str = setting(
        "gaussian",
        "calibration batch: Gaussian noise, or samples of the training distribution",
        choices=("gaussian", "real"),
    )
    calibration_size: int = setting(64, "samples in the calibration batch", least=16, most=512)
    calibration_seed: int = setting(0, "seed of the calibration batch", least=0, most=2**63 - 1)
    calibration_transport: str = setting(
        "seed",
        "nodes draw the batch from its seed, or get it sent once (always so for real batches)",
        choices=("seed", "arrays"),
    )
    alignment_every: int = setting(
        0,
        "uploads between two records of how well the gradients of client and server agree on "
        "test data; 0: never",
        least=0,
    )
    audit_fraction: float = setting(
        0.0, "share of the uploads whose sketch the server recomputes", least=0, most=1
    )
    audit_tolerance: float = setting(
        0.001, "how far off, relative to its length, an audited sketch may be", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibration == "real" and self.calibration_transport == "seed":
            raise ValueError(
                "calibration='real' cannot be drawn from a seed: set calibration-transport='arrays'"
            )

    def unread(self) -> dict[str, str]:
        """Return the settings that others make useless."""
        return {} if self.audit_fraction else {"audit-tolerance": "audit-fraction is 0"}


_NOT_STATE = {"settings", "given", "report", "version_report", "state_weights", "uploads_kept"}


class Rule(ABC):
    """Turns a stream of updates into a sequence of global models.

    A rule knows nothing of Flower, torch, clocks, files or logging. It never writes into a vector
    it was given, nor into one it has handed out: older versions may still be in use. Its vectors
    are the trainable parameters; of the other arrays (BatchNorm's statistics) it only says whose
    values a new version takes, and how much of each.

    Its state is in its attributes: numbers, texts, None, arrays, and lists, tuples, deques,
    mappings and dataclasses of them. They are saved and restored as they are, but for dataclasses
    inside of lists, which come back as dicts, and tuples, which come back as lists. Names that
    begin with an underscore, or are in `not_saved`, are no state.

    Parameters
    ----------
    settings : Method
        The method's settings.
    given : Given (default: None)
        What the run gives beside them.

    Attributes
    ----------
    synchronous : bool
        Whether the rule works in rounds: clients are sampled together, and `finish_round` makes the
        new model when the last of them has answered.
    model : Vector
        The current global model w.
    report : dict[str, Any]
        What the last call of `add` computed about that upload, for the events.
    version_report : dict[str, Any]
        What the last aggregation computed about the version it made.
    state_weights : Sequence[float] | None
        Convex weights with which the newest version takes the states of the last uploads; what is
        missing to a sum of 1 is the weight of the version before. None: those of all uploads since
        the version before, uniformly.
    uploads_kept : int
        How many of the last uploads may get such a weight again in a later version.
    """

    not_saved: ClassVar[tuple[str, ...]] = ()
    state_weights: Sequence[float] | None = None
    uploads_kept: int = 0
    model: Vector
    report: dict[str, Any]
    version_report: dict[str, Any]

    def __init__(self, settings: Any, given: Given | None = None) -> None:
        self.settings = settings
        self.given = given if given is not None else Given()

    @property
    def synchronous(self) -> bool:
        """Whether the method works in rounds."""
        return bool(self.settings.rounds)

    def start(self, model: Vector) -> None:
        """Begin from `model`, with everything else in its initial state."""
        self.model = model
        self.report = {}
        self.version_report = {}

    def take_step(self, weights: Sequence[float], deltas: Sequence[Vector]) -> Vector:
        """Return the new model, the old one plus Σ weight_i Δ_i, and report the weights."""
        self.model = weighted_step(self.model, weights, deltas)
        self.version_report = {"weights": weights, "effective_number": effective_number(weights)}
        return self.model

    def start_for(self, client: int) -> Vector:  # noqa: ARG002
        """Return what a client starts from; the current model itself, unless overridden."""
        return self.model

    @abstractmethod
    def add(self, update: Update) -> Vector | None:
        """Take one update; return the new global model if this one makes a version."""

    def finish_round(self) -> Vector | None:
        """Return the new global model of a round, or None if no client delivered."""
        raise NotImplementedError("only methods that work in rounds have rounds")

    def state_dict(self) -> dict[str, Any]:
        """Return all of the state as plain values: numbers, arrays, and lists and dicts of them."""
        left_out = {*_NOT_STATE, *self.not_saved}
        return {
            name: plain(value)
            for name, value in vars(self).items()
            if name not in left_out and not name.startswith("_")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        memory = getattr(self, "memory", None)
        self.start(state["model"])
        if memory is not None and self.settings.remembers_clients:
            self.memory = memory  # which may be one on disk, also if `start` makes a new one
        for name, saved in state.items():
            setattr(self, name, restored(getattr(self, name, None), saved))


class SketchedRule(Rule):
    """A rule that compares the sketches of clients with that of the model it holds."""

    def start(self, model: Vector) -> None:
        """Begin from `model`."""
        super().start(model)
        self._sketched: tuple[Vector, list[float]] | None = None

    @property
    def global_sketch(self) -> list[float]:
        """The sketch of the current model; computed when it is first asked for."""
        if self._sketched is None or self._sketched[0] is not self.model:
            if self.given.sketch is None:
                raise ValueError(f"{self.settings.label} needs a sketch of the global model")
            sketch = np.asarray(self.given.sketch(self.model), np.float64).tolist()
            self._sketched = (self.model, sketch)
        return self._sketched[1]


class BufferedRule(Rule):
    """Collects updates until the buffer is full, then makes a version of them.

    For methods with a setting `buffer_size`, or with rounds, where the buffer is full when the
    round ends; a subclass writes `aggregate`.
    """

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty buffer."""
        super().start(model)
        self.buffer: list[Update] = []

    def add(self, update: Update) -> Vector | None:
        """Buffer the update; aggregate when the buffer is full."""
        self.buffer.append(update)
        if self.synchronous or len(self.buffer) < self.settings.buffer_size:
            return None
        return self._make_version()

    def finish_round(self) -> Vector | None:
        """Aggregate the uploads of a round."""
        return self._make_version() if self.buffer else None

    def _make_version(self) -> Vector:
        updates, self.buffer = self.buffer, []
        self.state_weights = [1 / len(updates)] * len(updates)  # unless `aggregate` has others
        self.model = self.aggregate(updates)
        return self.model

    @abstractmethod
    def aggregate(self, updates: list[Update]) -> Vector:
        """Return the new model, made of `self.model` and a full buffer."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self.buffer = [Update(**update) for update in self.buffer]  # type: ignore[arg-type]
