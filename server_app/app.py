"""Flower's entry point on the server."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedpsa_strategy.checkpoint import Checkpointer, CheckpointStore, load
from fedpsa_strategy.events import Listener
from fedpsa_strategy.loop import STOP_REQUESTED
from server_app.build import build_experiment, make_task
from server_app.curve import draw_curve
from server_app.progress import DAY, Progress, area_under_curve
from server_app.run_dir import EventLog, RunDir, model_sha256, read_events
from server_app.settings import Settings, SettingsError
from server_app.stopping import StopSignals
from server_app.task_defaults import resolve
from server_app.tensorboard import TensorBoardLog
from task.hardware import set_threads

log = logging.getLogger("flwr")

app = ServerApp()

# Flower gives a signal once and may hold up the run's thread: it must not wait for ever.
_PATIENCE = 2.5


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config describes."""
    try:
        settings = Settings.from_run_config(context.run_config)
    except SettingsError as error:
        _note_refusal(context.run_config.get("run-dir"), str(error))
        raise
    for sentence in settings.without_effect():
        log.warning("%s", sentence)
    with StopSignals(_PATIENCE) as signals:
        run_settings(grid, settings, signals.requested)


def _note_refusal(path: object, error: str) -> None:
    """Leave the reason in the run's folder, where whoever started the run looks for it."""
    if isinstance(path, str) and path:
        # A folder that holds a run stays as it is, and one that cannot be made is no news.
        with suppress(OSError, ValueError):
            RunDir(Path(path)).write_summary({"status": "failed", "error": error})


def run_settings(
    grid: Grid, settings: Settings, stop_fn: Callable[[], bool] | None = None
) -> dict[str, Any]:
    """Run an experiment, write its folder and return its summary.

    Parameters
    ----------
    grid : Grid
        Where the nodes are.
    settings : Settings
        What to run.
    stop_fn : Callable[[], bool] | None (default: None)
        Asked about twice a second; the run ends in good order when it returns True, or when there
        is a file `stop-requested` in its folder.
    """
    if not settings.run_dir:
        default = RunDir.default_path(settings.strategy, settings.data_name)
        settings = replace(settings, run_dir=str(default))
    run_dir = RunDir(Path(settings.run_dir), resume=bool(settings.resume))
    progress = Progress(
        settings.status_interval, settings.clock == "virtual", _share_done(settings)
    )
    summary: dict[str, Any] = {"status": "failed", "settings": settings.to_run_config()}
    try:
        set_threads(settings.threads)
        saved = load_checkpoint(settings, run_dir) if settings.resume else None
        settings = resolve(settings, None if saved is None else saved["extra"]["settings"])
        summary["settings"] = settings.to_run_config()
        run_dir.write_config(settings.to_run_config())
        keep = 0 if saved is None else saved["extra"]["events_size"]
        if saved is not None:
            progress.replay(read_events(run_dir.events_path, keep))
            log.info("Resuming at version %d, %d uploads", saved["version"], saved["uploads"])
        if (prepare := getattr(make_task(settings), "prepare", None)) is not None:
            prepare()
        with ExitStack() as stack:
            event_log = stack.enter_context(EventLog(run_dir.events_path, keep))
            listeners: list[Listener] = [event_log, progress]
            if settings.tensorboard:
                board = TensorBoardLog(run_dir.path / "tensorboard")
                listeners.append(stack.enter_context(board))
            experiment = build_experiment(settings, listeners)
            strategy = experiment.strategy
            # On the Ray engine no signal reaches this thread; a file does on every engine.
            requested = (run_dir.path / "stop-requested").exists
            strategy.stop_fn = lambda: requested() or (stop_fn is not None and stop_fn())
            strategy.resume_from = saved
            strategy.checkpointer = Checkpointer(
                checkpoint_store(settings, run_dir.path),
                settings.checkpoint_versions,
                settings.checkpoint_seconds,
                lambda: {"settings": settings.to_run_config(), "events_size": event_log.size},
            )
            result = strategy.start(
                grid=grid,
                initial_arrays=experiment.initial_arrays,
                num_rounds=settings.rounds,
                timeout=settings.reply_timeout,
                train_config=experiment.train_config,
                evaluate_fn=experiment.evaluate_fn,
            )
        run_dir.write_model(result.arrays)
        run_dir.write("curve.png", _picture(settings, progress))
        summary["status"] = "stopped" if progress.end_reason == STOP_REQUESTED else "completed"
        summary["model_sha256"] = model_sha256(result.arrays)
    except BaseException as error:
        # A signal, or Flower's word that the run was stopped.
        if not isinstance(error, Exception):
            summary["status"] = "stopped"
        summary["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        summary |= _numbers(progress)
        run_dir.write_summary(summary)
    _log_summary(summary, run_dir.path)
    return summary


def checkpoint_store(settings: Settings, folder: Path) -> CheckpointStore:
    """Return where the checkpoints of the run in a folder are."""
    return CheckpointStore(folder / "checkpoints", settings.checkpoint_keep)


def load_checkpoint(settings: Settings, run_dir: RunDir) -> dict[str, Any]:
    """Return the checkpoint to go on from, if the settings still fit it."""
    path = run_dir.path if settings.resume == "true" else Path(settings.resume)
    saved = checkpoint_store(settings, path).load_newest() if path.is_dir() else load(path)
    before = saved["extra"]["settings"]
    if changed := resolve(settings, before).changed_since(before):
        listed = ", ".join(
            f"{key} was {then!r}, now {now!r}" for key, (then, now) in changed.items()
        )
        raise SettingsError(f"a resumed run must keep its settings: {listed}")
    return saved


def _share_done(settings: Settings) -> Any:
    """Return a function that tells how much of a run is done, by the limit that is nearest."""

    def share(progress: Progress) -> float:
        shares = [0.0]
        if settings.num_server_rounds:
            shares.append(progress.version / settings.num_server_rounds)
        if settings.clock == "virtual" and settings.virtual_days:
            shares.append(progress.time / (settings.virtual_days * DAY))
        if settings.time_limit:
            shares.append(progress.seconds / settings.time_limit)
        return min(max(shares), 1.0)

    return share


def _picture(settings: Settings, progress: Progress) -> bytes:
    loss = bool(progress.losses) and not progress.curve  # regression has no accuracy
    return draw_curve(
        progress.losses if loss else progress.curve,
        title=f"{settings.strategy} on {settings.data_name}, {settings.num_clients} clients",
        virtual=progress.virtual,
        measure="loss" if loss else "accuracy",
    )


def _numbers(progress: Progress) -> dict[str, Any]:
    area = area_under_curve(progress.curve)
    return {
        "end_reason": progress.end_reason,
        "accuracy": progress.accuracy,
        "best_accuracy": progress.best_accuracy,
        "loss": progress.loss,
        "area_under_curve": area / DAY if area is not None and progress.virtual else area,
        "versions": progress.version,
        "uploads": progress.uploads,
        "rejected": progress.rejected,
        "quarantines": progress.quarantines,
        "time": progress.time,
        "seconds": progress.seconds,
        "uploads_per_second": progress.uploads_per_second,
        "bytes_up": progress.bytes_up,
        "bytes_down": progress.bytes_down,
        "server_seconds": progress.server_seconds,
        "mean_train_seconds": progress.mean("train-seconds"),
        "mean_sensitivity_seconds": progress.mean("sensitivity-seconds"),
        "mean_kappa": progress.mean("kappa"),
        "mean_staleness": progress.mean("staleness"),
        "mean_effective_number": progress.mean("effective_number"),
        "packages": {name: version(name) for name in ("flwr", "torch", "numpy")},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _log_summary(summary: dict[str, Any], path: Path) -> None:
    log.info("")
    log.info("Done: %s", summary["end_reason"])
    if summary["accuracy"] is not None:
        percents = [100 * summary[key] for key in ("accuracy", "best_accuracy")]
        log.info("  accuracy  %.2f %% (best %.2f %%)", *percents)
    elif summary["loss"] is not None:
        log.info("  loss      %.4g", summary["loss"])
    log.info(
        "  versions  %d from %d uploads, %d rejected",
        *(summary[key] for key in ("versions", "uploads", "rejected")),
    )
    log.info(
        "  speed     %.1f uploads/s, %.0f s",
        summary["uploads_per_second"] or 0.0,
        summary["seconds"],
    )
    log.info("  model     sha256 %s", summary["model_sha256"])
    log.info("  files     %s", path)
