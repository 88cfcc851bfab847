"""Flower's entry point on the server."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedpsa_strategy.errors import FedPSAError
from fedpsa_strategy.server.callbacks.stop import STOP_REQUESTED
from fedpsa_strategy.server.checkpoint import Checkpointer
from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.server.snapshot import check_fits
from fedpsa_strategy.watch.curve import draw_curves
from fedpsa_strategy.watch.event_log import EventLog, complete_size, read_events
from fedpsa_strategy.watch.rate import rate_text
from fedpsa_strategy.watch.status_line import StatusLine
from fedpsa_strategy.wire.layout import Layout
from server_app.build import build_experiment, make_task
from server_app.method_settings import SettingsError
from server_app.no_effect import without_effect
from server_app.places import STOP_REQUEST, run_name, runs_folder, unused
from server_app.resume import checkpoint_store, limits_of, load_checkpoint
from server_app.run_dir import CURVE, RunDir, RunDirError, model_sha256
from server_app.settings import Settings
from server_app.stopping import StopSignals
from server_app.task_defaults import resolve
from server_app.trackers import open_trackers
from task.hardware import set_threads

log = logging.getLogger("flwr")

app = ServerApp()

# Flower gives a signal once and may hold up the run's thread: it must not wait forever.
_PATIENCE = 2.5


class NothingLearnedError(FedPSAError):
    """A run that ended without a single new version of the model; the text says why."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config describes."""
    try:
        settings = Settings.from_run_config(context.run_config)
    except SettingsError as error:
        _note_refusal(context.run_config.get("run-dir"), str(error))
        raise
    for sentence in without_effect(settings):
        log.warning("%s", sentence)
    with StopSignals(_PATIENCE) as signals:
        run_settings(grid, settings, signals.requested)


def _note_refusal(path: object, error: str) -> None:
    """Leave the reason in the run's folder, where the user looks for it."""
    if isinstance(path, str) and path:
        # A folder that holds a run stays as it is; one that cannot be made is reported elsewhere.
        with suppress(OSError, ValueError, RunDirError), RunDir(Path(path)) as run_dir:
            run_dir.write_summary({"status": "failed", "error": error})


def run_settings(
    grid: Grid, settings: Settings, stop_fn: Callable[[], bool] | None = None
) -> dict[str, Any]:
    """Run an experiment, write its folder and return its summary.

    `stop_fn` is asked about twice a second; the run ends cleanly when it returns True, or when
    there is a file `stop-requested` in its folder.
    """
    if not settings.run_dir:
        path = unused(runs_folder() / run_name(settings.strategy, settings.data_name))
        settings = replace(settings, run_dir=str(path))
    with RunDir(Path(settings.run_dir), resume=bool(settings.resume)) as run_dir:
        log.info("Results go to %s", run_dir.path)
        summary = _run(grid, settings, run_dir, stop_fn)
    _log_summary(summary, run_dir.path)
    return summary


def _run(
    grid: Grid, settings: Settings, run_dir: RunDir, stop_fn: Callable[[], bool] | None
) -> dict[str, Any]:
    status = StatusLine(settings.status_interval, settings.clock == "virtual", limits_of(settings))
    summary: dict[str, Any] = {"status": "failed", "settings": settings.to_run_config()}
    begun = not settings.resume  # a resume that is refused leaves everything as it was
    saved = None
    try:
        set_threads(settings.threads)
        if settings.resume:
            saved = load_checkpoint(settings)
        settings = resolve(settings, None if saved is None else saved["extra"]["settings"])
        summary["settings"] = settings.to_run_config()
        if (prepare := getattr(make_task(settings), "prepare", None)) is not None:
            prepare()
        experiment = build_experiment(settings, [status])
        strategy = experiment.strategy
        if saved is not None:
            layout = Layout(experiment.initial_arrays, strategy.trainable)
            check_fits(saved, strategy.rule, layout.size)
        begun = True
        run_dir.write_config(settings.to_run_config())
        keep = 0 if saved is None else _replay(saved, settings, run_dir, status)
        with ExitStack() as stack:
            event_log = stack.enter_context(
                EventLog(run_dir.events_path, keep, part_size=int(settings.events_part_mb * 1e6))
            )
            strategy.listeners.insert(0, event_log)
            for tracker in open_trackers(settings, run_dir.path):
                stack.enter_context(tracker)
                strategy.listeners.append(tracker)
            # On the Ray engine no signal reaches this thread; a file does on every engine.
            requested = (run_dir.path / STOP_REQUEST).exists
            strategy.limits = replace(
                strategy.limits,
                stop_fn=lambda: requested() or (stop_fn is not None and stop_fn()),
            )
            strategy.checkpointer = Checkpointer(
                checkpoint_store(settings, run_dir.path),
                settings.checkpoint_versions,
                settings.checkpoint_seconds,
                # The events that a checkpoint counts are on the disk before it is.
                lambda: {"settings": settings.to_run_config(), "events_size": event_log.sync()},
                resume_from=saved,
            )
            result = strategy.start(
                grid=grid,
                initial_arrays=experiment.initial_arrays,
                num_rounds=settings.rounds,
                timeout=settings.reply_timeout,
                train_config=experiment.train_config,
                evaluate_fn=experiment.evaluate_fn,
            )
        stopped = status.run.end_reason == STOP_REQUESTED
        if not status.run.version and not stopped:
            raise NothingLearnedError(_why_nothing(status, strategy.state.reasons))
        run_dir.write_model(result.arrays)
        run_dir.write(CURVE, _picture(settings, status))
        summary["status"] = "stopped" if stopped else "completed"
        summary["model_sha256"] = model_sha256(result.arrays)
    except BaseException as error:
        # A signal, or Flower's word that the run was stopped.
        if not isinstance(error, Exception):
            summary["status"] = "stopped"
        summary["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if begun:
            summary |= _numbers(status)
            _write_summary(run_dir, summary)
    return summary


def _write_summary(run_dir: RunDir, summary: dict[str, Any]) -> None:
    try:
        run_dir.write_summary(summary)
    except OSError as error:
        if "error" not in summary:
            raise
        log.error("The summary could not be written: %s", error)  # what went wrong first is raised


def _replay(saved: dict[str, Any], settings: Settings, run_dir: RunDir, status: StatusLine) -> int:
    """Tell `status` what happened before a checkpoint; return how much of the log that is."""
    counted = saved["extra"]["events_size"]
    keep = complete_size(run_dir.events_path, counted)
    status.replay(read_events(run_dir.events_path, keep))
    if keep < counted:
        log.warning(
            "%s has %d of the %d bytes that the checkpoint counts: the other events are lost",
            run_dir.events_path,
            keep,
            counted,
        )
        # Else the next resume would take what is written from here on for events before it.
        saved["extra"]["events_size"] = keep
        checkpoint_store(settings, run_dir.path).save(saved["sequence"], saved)
    log.info("Resuming at version %d, %d uploads", saved["version"], saved["uploads"])
    return keep


def _why_nothing(status: StatusLine, reasons: Counter[str]) -> str:
    text = (
        f"the run ended without a new version of the model ({status.run.end_reason}): "
        f"{status.run.uploads} uploads were accepted, {status.run.rejected} replies rejected"
    )
    listed = "; ".join(f"{count}x {reason}" for reason, count in reasons.most_common(3))
    return f"{text}. Most frequent reasons: {listed}" if listed else text


def _picture(settings: Settings, status: StatusLine) -> bytes:
    measure, curve = status.run.points(DAY if status.virtual else 1.0)
    title = f"{settings.strategy} on {settings.data_name}, {settings.num_clients} clients"
    return draw_curves({"": curve}, virtual=status.virtual, measure=measure, title=title)


def _numbers(status: StatusLine) -> dict[str, Any]:
    return status.run.numbers(DAY if status.virtual else 1.0) | {
        "seconds": status.seconds,
        "uploads_per_second": status.uploads_per_second,
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
        "  speed     %s, %.0f s",
        rate_text(summary["uploads_per_second"]),
        summary["seconds"],
    )
    log.info("  model     sha256 %s", summary["model_sha256"])
    log.info("  files     %s", path)
