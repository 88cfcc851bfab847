"""A task of one's own, run by the app's server and clients on a scripted grid."""

import sys
import types
from itertools import count

from flwr.app import Context, RecordDict

from client_app.app import app
from server_app.build import build_experiment
from server_app.settings import Settings
from support.grids import ScriptedGrid
from support.runs import Recorder, run
from task.tasks import find_task

_numbers = count()
NODES = 4


def install(monkeypatch, **functions):
    """Make a module of these functions; return the name by which settings find it."""
    name = f"task_of_a_test_{next(_numbers)}"
    module = types.ModuleType(name)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    find_task.cache_clear()
    return name


def settings_of(name, **more):
    given = {
        "task": name,
        "num_clients": NODES,
        "buffer_size": 2,
        "queue_size": 4,
        "fraction_train": 0.5,
        "calibration_size": 16,
        "audit_fraction": 1.0,
        "local_epochs": 2,
        "evaluate_every": 1,
        "batch_size": 16,
        "lr": 0.2,
        "threads": 1,
    }
    run_config = {key.replace("_", "-"): value for key, value in (given | more).items()}
    return Settings.from_run_config(run_config)


def run_task(name, *, versions=6, **more):
    """Return Flower's result, the events, the grid and the experiment of a run."""
    settings = settings_of(name, **more)
    events = Recorder()
    experiment = build_experiment(settings, [events])
    contexts = [
        Context(1, number, {"partition-id": number, "num-partitions": NODES}, RecordDict(), config)
        for number, config in enumerate([settings.to_run_config()] * NODES)
    ]

    def behaviour(message):
        return app(message, contexts[grid.partition(message)]).content

    grid = ScriptedGrid(NODES, behaviour)
    result = run(
        experiment.strategy,
        grid,
        num_versions=versions,
        arrays=experiment.initial_arrays,
        evaluate_fn=experiment.evaluate_fn,
        config=dict(experiment.train_config),
    )
    assert not events.of("reject"), events.of("reject")[0].reason
    return result, events, grid, experiment
