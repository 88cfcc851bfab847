"""A run's numbers for Weights & Biases, which is an optional package."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpsa_strategy.files import write_atomically
from fedpsa_strategy.server.events import Event
from fedpsa_strategy.watch.scalars import Scalars
from fedpsa_strategy.watch.tracker import Tracker, first_line, kept_id, missing

log = logging.getLogger("flwr")


class WandbLog(Tracker):
    """Listener that makes a W&B run; its curves are drawn against the run's time.

    W&B's own variables count: `WANDB_MODE=offline` writes files for a later `wandb sync`,
    `WANDB_ENTITY` and `WANDB_API_KEY` say whose run it is. W&B sends from a process of its own, so
    that a slow network does not delay the run.

    Parameters
    ----------
    project : str
        W&B's project.
    name : str
        The run's name.
    folder : Path
        Where W&B keeps its files.
    config : Mapping[str, Any] | None (default: None)
        Settings.
    id_file : Path | None (default: None)
        Where the id of the W&B run is kept. If it is there, the same W&B run goes on.

    Raises
    ------
    ModuleNotFoundError
        If W&B is not installed.
    ConnectionError
        If W&B does not take the run at its start.
    """

    def __init__(
        self,
        project: str,
        name: str,
        folder: Path,
        config: Mapping[str, Any] | None = None,
        *,
        id_file: Path | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("W&B", error, "wandb") from error
        self._scalars = Scalars()
        self._failed = False
        try:
            known = kept_id(id_file)
            self._run: Any = wandb.init(
                project=project,
                name=name,
                dir=str(folder),
                config=dict(config or {}),
                id=known,
                resume="allow",
                allow_val_change=True,  # a resumed run may have another limit
                # The run has a log and settings of its own; only numbers leave this machine.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, save_code=False
                ),
            )
            self._run.define_metric("time", hidden=True)
            self._run.define_metric("*", step_metric="time")
        except Exception as error:
            raise ConnectionError(
                f"W&B does not take the run ({first_line(error)}): log in with "
                "`wandb login`, or set WANDB_MODE=offline"
            ) from error
        if id_file is not None and not known:
            write_atomically(id_file, self._run.id + "\n")

    def __call__(self, event: Event) -> None:
        """Hand on what the event says."""
        if numbers := self._scalars(event):
            try:
                self._run.log({"time": event.time, **numbers})
            except Exception as error:
                if not self._failed:
                    log.warning("W&B does not take numbers, the run continues without: %s", error)
                self._failed = True

    def close(self, error: BaseException | None = None) -> None:
        """Write out what is pending and end the W&B run."""
        try:
            self._run.finish(exit_code=0 if error is None else 1)
        except Exception as problem:
            log.warning("The run in W&B could not be ended: %s", problem)
