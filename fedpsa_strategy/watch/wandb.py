"""A run's numbers for Weights & Biases, which is an optional package."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fedpsa_strategy.files import write_atomically
from fedpsa_strategy.server.events import Event
from fedpsa_strategy.watch.scalars import Scalars

log = logging.getLogger("flwr")


class WandbLog:
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
            raise ModuleNotFoundError(
                f"W&B cannot be imported ({error}); install it with: pip install wandb"
            ) from error
        self._scalars = Scalars()
        self._failed = False
        known = id_file is not None and id_file.is_file()
        try:
            self._run: Any = wandb.init(
                project=project,
                name=name,
                dir=str(folder),
                config=dict(config or {}),
                id=id_file.read_text(encoding="utf-8").strip() if id_file and known else None,
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
                f"W&B does not take the run ({str(error).splitlines()[0][:300]}): log in with "
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

    def close(self, exit_code: int = 0) -> None:
        """Write out what is pending and end the W&B run."""
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            log.warning("The run in W&B could not be ended: %s", error)

    def __enter__(self) -> WandbLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(0 if error is None else 1)
