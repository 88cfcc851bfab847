"""Constant entries of the train config."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord

from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import Task


class TrainConfig(Callback):
    """Adds the same entries to the config of every train message.

    Parameters
    ----------
    entries : dict[str, Any]
        The entries.
    """

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries

    def configure(self, task: Task, config: ConfigRecord) -> None:  # noqa: ARG002
        """Add the entries."""
        config.update(self.entries)
