"""What else is told of a run, if the settings ask for it: listeners from optional packages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fedpsa_strategy.watch.mlflow import MLflowLog
from fedpsa_strategy.watch.prometheus import PrometheusMetrics
from fedpsa_strategy.watch.tensorboard import TensorBoardLog
from fedpsa_strategy.watch.tracker import Tracker
from fedpsa_strategy.watch.wandb import WandbLog
from server_app.settings import Settings


def open_trackers(settings: Settings, folder: Path) -> Iterator[Tracker]:
    """Yield the trackers that the settings name, each open; the folder's name is the run's."""
    config = settings.to_run_config()
    if settings.tensorboard:
        yield TensorBoardLog(folder / "tensorboard")
    if settings.mlflow:
        yield MLflowLog(
            settings.mlflow,
            folder.name,
            config,
            experiment=os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedpsa"),
            id_file=folder / "mlflow-run",
        )
    if settings.wandb:
        yield WandbLog(settings.wandb, folder.name, folder, config, id_file=folder / "wandb-run")
    if settings.prometheus:
        yield PrometheusMetrics(
            settings.prometheus,
            run=folder.name,
            strategy=settings.strategy,
            data=settings.data_name,
        )
