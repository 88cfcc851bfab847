"""What the launcher tells the warm process, and how that speaks."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "node.json"

WARM_VARIABLE = "FEDPSA_NODE_WARM"
"""Environment variable: 0 starts the SuperNode as Flower does, without a warm process."""

PRELOAD_VARIABLE = "FEDPSA_NODE_PRELOAD"
"""Environment variable: modules to import before the first message, separated by spaces."""


@dataclass(frozen=True)
class NodeSettings:
    """The settings of a warm process."""

    script: str  # the ordinary `flwr-clientapp`
    own_module: str  # what that imports itself before an app
    preload: list[str] | None  # libraries to import before the first message; None: the usual ones

    def write(self, folder: Path) -> None:
        """Save the settings."""
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> NodeSettings:
        """Read saved settings."""
        return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))


def say(text: str) -> None:
    """Write a line to the SuperNode's log."""
    with contextlib.suppress(OSError):
        os.write(2, f"INFO :      fedpsa-node: {text}\n".encode())
