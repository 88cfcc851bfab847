"""From settings to the objects of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from torch import nn

from fedpsa_strategy import (
    AsyncStrategy,
    Calibration,
    ConstantLatency,
    FedPAC,
    FedPSA,
    LongTailLatency,
    Probe,
    Sketch,
    UniformLatency,
    VirtualClock,
    WallClock,
    arrays_of,
    load_arrays,
)
from fedpsa_strategy.methods.base import Sketched
from fedpsa_strategy.methods.fedpac import FedPACMethod
from fedpsa_strategy.probe.sensitivity import num_trainable
from fedpsa_strategy.probe.state_dicts import as_array
from fedpsa_strategy.seeds import derive, model_seed
from fedpsa_strategy.server.callbacks import NormGuard, StalenessLimit
from fedpsa_strategy.server.clock import DAY, Clock, Latency
from fedpsa_strategy.server.events import Listener
from fedpsa_strategy.server.options import Evaluation, Failures, Limits, Training
from fedpsa_strategy.server.strategies import strategy_of
from fedpsa_strategy.wire.contract import trainable_keys
from server_app.alignment import Alignment
from server_app.personal import personal_accuracy
from server_app.privacy import make_privacy
from server_app.settings import Settings
from server_app.task_defaults import resolve
from task.hardware import resolve_device
from task.kinds import Kind
from task.own_checks import check_cross_entropy, check_own_task
from task.tasks import (
    DatasetTask,
    LearningTask,
    as_shard,
    calibration_recipe,
    find_task,
    own_metrics_of,
)
from task.training import measure

Config = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What `strategy.start` needs."""

    strategy: AsyncStrategy
    initial_arrays: ArrayRecord
    train_config: ConfigRecord
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord]


def build_experiment(settings: Settings, listeners: Sequence[Listener]) -> Experiment:
    """Return the experiment that the settings describe."""
    settings = resolve(settings)
    task = make_task(settings)
    model = task.make_model(model_seed(settings.seed))
    model.to(resolve_device(settings.device))
    kind = check_own_task(model, as_shard(task.test_data(), "test_data"), task.loss, "test_data")
    common: Config = {
        "fraction_train": settings.fraction_train,
        "max_in_flight": settings.max_in_flight or None,
        "queued_per_node": settings.queued_per_node,
        "fraction_evaluate": settings.fraction_evaluate,
        "min_available_nodes": settings.min_nodes or settings.num_clients,
        "trainable": trainable_keys(model),
        "clock": make_clock(settings),
        "num_clients": settings.num_clients,
        "seed": settings.seed,
        "training": Training(
            settings.lr_decay, _uploads_per_version(settings), settings.update_dtype
        ),
        "limits": Limits(
            deadline=settings.virtual_days * DAY or None if settings.clock == "virtual" else None,
            time_limit=settings.time_limit or None,
            target_accuracy=settings.target_accuracy or None,
        ),
        "evaluation": Evaluation(settings.evaluate_every, settings.evaluate_interval or None),
        "failures": Failures(
            settings.max_failures,
            settings.failure_pause,
            settings.node_timeout,
            query_timeout=60.0,
            overdue_factor=settings.overdue_factor,
            overdue_floor=settings.overdue_floor,
            overdue_ceiling=settings.overdue_ceiling,
        ),
        "callbacks": [
            NormGuard(settings.max_update_norm, settings.max_update_ratio, settings.norm_action),
            *make_privacy(settings),
            *([StalenessLimit(settings.max_staleness)] if settings.max_staleness else []),
        ],
        "listeners": listeners,
    }
    config: Config = {
        "lr": settings.lr,
        "local-epochs": settings.local_epochs,
        "batch-size": settings.batch_size,
    }
    strategy = make_strategy(settings, task, model, kind, config, common)
    if every := getattr(settings.method, "alignment_every", 0):
        strategy.callbacks.append(
            Alignment(
                model,
                as_shard(task.test_data(), "test_data"),
                task.loss,
                every=every,
                seed=derive(settings.seed, "alignment"),
            )
        )
    return Experiment(
        strategy=strategy,
        initial_arrays=arrays_of(model),
        train_config=ConfigRecord(config),
        evaluate_fn=make_evaluate_fn(settings, task, model, kind, strategy),
    )


def _uploads_per_version(settings: Settings) -> int | None:
    """Return in which units of uploads the learning rate decays, if it decays by them."""
    if settings.lr_decay_per != "upload":
        return None
    return int(getattr(settings.method, "buffer_size", settings.buffer_size))


def make_strategy(
    settings: Settings,
    task: LearningTask,
    model: nn.Module,
    kind: Kind | None,
    config: Config,
    common: Config,
) -> AsyncStrategy:
    """Return the strategy; what clients need for sketches is added to the train config."""
    method = settings.method
    head: Any = getattr(model, "head", None)
    if method.needs_head and not (isinstance(head, nn.Linear) and hasattr(model, "encoder")):
        raise ValueError(f"{method.label} needs a model with an `encoder` and a linear `head`")
    on_disk = method.remembers_clients and getattr(method, "memory", "ram") == "file"
    path = Path(settings.run_dir) / f"{method.name}-memory.bin" if on_disk else None
    if isinstance(method, Sketched):
        probe = make_probe(method, task, model, kind)
        config |= probe.config(method.calibration_transport)
        as_arrays = method.calibration_transport == "arrays"
        return FedPSA(
            method=method,
            sketch_fn=probe.sketch_fn(model),
            calibration_arrays=probe.arrays() if as_arrays else None,
            memory_path=path,
            **common,
        )
    if isinstance(method, FedPACMethod):
        if not isinstance(task, DatasetTask):
            shard = as_shard(task.test_data(), "test_data")
            check_cross_entropy(model, shard, task.loss, "strategy='fedpac'")
        return FedPAC(
            method=method,
            head_keys=[f"head.{name}" for name, _ in head.named_parameters()],
            num_classes=head.out_features,
            num_features=head.in_features,
            **common,
        )
    return strategy_of(type(method))(method=method, memory_path=path, **common)


def make_clock(settings: Settings) -> Clock:
    """Return the clock of a run."""
    if settings.clock == "wall":
        return WallClock()
    common: dict[str, Any] = {"seed": settings.seed, "per": settings.latency_per}
    latency: Latency
    if settings.latency == "constant":
        latency = ConstantLatency(value=float(settings.latency_max), **common)
    else:
        law = UniformLatency if settings.latency == "uniform" else LongTailLatency
        latency = law(low=settings.latency_min, high=settings.latency_max, **common)
    return VirtualClock(latency)


def make_task(settings: Settings) -> LearningTask:
    """Return the user's own task, or the dataset's."""
    if settings.task:
        return find_task(settings.task)
    return DatasetTask(
        settings.dataset,
        settings.num_clients,
        settings.partition,
        settings.dirichlet_alpha,
        settings.test_fraction,
        settings.seed,
        settings.data_dir,
        settings.cache_dir,
        settings.model,
        settings.model_width,
        settings.held_out,
    )


def make_probe(method: Sketched, task: LearningTask, model: nn.Module, kind: Kind | None) -> Probe:
    """Return the probe with which server and clients sketch models."""
    shard = as_shard(task.test_data(), "test_data")
    if method.calibration == "gaussian":
        return Probe.gaussian(
            model,
            **calibration_recipe(shard, kind),
            size=method.calibration_size,
            seed=method.calibration_seed,
            dim=method.sketch_dim,
            sketch_seed=method.sketch_seed,
            kind=method.sketch_kind,
            signal=method.signal,
            loss_fn=task.loss,
        )
    # Never from the test split: what is tuned on it could not be judged by it.
    own = getattr(task, "calibration_data", None)
    data = own() if callable(own) else None
    if data is None:
        raise ValueError(
            "calibration='real' needs samples that are used neither for training nor for tests: "
            "give the task a function calibration_data() that returns inputs and targets"
        )
    shard = as_shard(data, "calibration_data")
    generator = np.random.Generator(np.random.Philox(method.calibration_seed))
    size = min(method.calibration_size, len(shard))
    chosen = generator.choice(len(shard), size, replace=False)
    calibration = Calibration.real(as_array(shard.x[chosen]), as_array(shard.y[chosen]))
    law: Any = method.sketch_kind
    sketch = Sketch(num_trainable(model), method.sketch_dim, method.sketch_seed, law)
    return Probe(calibration, sketch, method.signal, task.loss)


def make_evaluate_fn(
    settings: Settings,
    task: LearningTask,
    model: nn.Module,
    kind: Kind | None,
    strategy: AsyncStrategy,
) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Return centralised evaluation on the test data; `model` is used as a workspace."""
    shard = as_shard(task.test_data(), "test_data")
    device = resolve_device(settings.device)
    loss_fn = None if isinstance(task, DatasetTask) else task.loss
    common: Config = {"device": device, "loss_fn": loss_fn, "metrics_fn": own_metrics_of(task)}

    def evaluate_arrays(version: int, arrays: ArrayRecord) -> MetricRecord:  # noqa: ARG001
        load_arrays(model, arrays)
        metrics = MetricRecord({**measure(model, shard, kind=kind, **common)})
        if isinstance(strategy, FedPAC):
            personal = personal_accuracy(model, shard, strategy.personal_heads(), device=device)
            if personal is not None:
                metrics["personal-accuracy"] = personal
        return metrics

    return evaluate_arrays
